"""Adapters in a model of transformers: the only importer of peft."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ppctl.errors import ConfigError, Problem, pasted
from ppctl.geometry.foreign_model import Adapters, Anatomy

_NAME = "default"
"""peft's own name of a model's only adapter."""


def add_adapters(model: nn.Module, adapters: Adapters, anatomy: Anatomy, dtype: torch.dtype) -> nn.Module:
    """Put peft's modules around the targets and freeze all else; adapters are as wide as the weights. Raises
    ConfigError: PP-E540 for targets that no decoder layer has, PP-E541 without peft, PP-E542 in its own words for what
    it does not adapt."""
    try:
        import peft
    except ImportError as missing:
        message = f"peft cannot be imported: {missing}"
        raise ConfigError(Problem("PP-E541", message, "pip install 'ppctl[lora]'", "model.lora")) from missing
    alpha: Any = adapters.alpha  # any number, which peft divides by the rank
    config = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=alpha,
        target_modules=_modules(model, adapters, anatomy),
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,
    )
    try:
        with warnings.catch_warnings():  # it says that it turns GPT-2's matrices by itself
            warnings.simplefilter("ignore")
            injected: Any = peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        message = f"peft cannot adapt a module of model.lora.targets: {str(error).splitlines()[0]}"
        remedy = pasted(f"model.lora.targets=[{','.join(_known(model, anatomy)[:2])}]")
        raise ConfigError(Problem("PP-E542", message, remedy, "model.lora")) from error
    for parameter in injected.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    adapted: nn.Module = injected
    return adapted


def _modules(model: nn.Module, adapters: Adapters, anatomy: Anatomy) -> list[str]:
    """The full names of the modules that get an adapter. Raises ConfigError (PP-E540)."""
    last = anatomy.count - 1
    beyond = [layer for layer in adapters.layers if layer > last]
    if beyond:
        raise _wrong(f"layers={beyond[0]} is not a decoder layer; they are 0 to {last}", "'model.lora.layers=[0]'")
    known = _known(model, anatomy)
    remedy = pasted(f"model.lora.targets=[{','.join(known[:2])}]")
    inside: list[str] = []
    chosen = tuple(f"{anatomy.layer(layer)}." for layer in adapters.layers or range(anatomy.count))
    for target in adapters.targets:
        named = [path for path, _ in model.named_modules() if f".{path}".endswith(f".{target}")]
        outside = [path for path in named if not path.startswith(f"{anatomy.layers}.")]
        own = [path for path in named if path.startswith(chosen)]
        if outside or not own:
            raise _wrong(f"{target} {_why(model, target, named, outside)}; these have {', '.join(known)}", remedy)
        inside += own
    return list(dict.fromkeys(inside))


def _why(model: nn.Module, target: str, named: list[str], outside: list[str]) -> str:
    if outside:
        return f"is outside the decoder layers, as {outside[0]}"
    if named:
        return "is a module of other decoder layers than model.lora.layers names"
    if any(path.endswith(f".{target}") for path, _ in model.named_parameters()):
        return "is a tensor of several experts, not a module"
    return "is not a module of the decoder layers"


def _known(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """The last parts of the names of the linear modules, GPT-2's Conv1D among them; routers are none."""
    targets = {
        path.rpartition(".")[2]
        for path, module in model.named_modules()
        if path.startswith(f"{anatomy.layers}.")
        and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    }
    return sorted(targets)


def _wrong(message: str, remedy: str) -> ConfigError:
    return ConfigError(Problem("PP-E540", f"model.lora: {message}", remedy, "model.lora"))


def shapes_of(adapted: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """The canonical names of the parts of all adapters, with their shapes."""
    return {canonical(name): tuple(p.shape) for name, p in adapted.named_parameters() if p.requires_grad}


def canonical(name: str) -> str:
    """The canonical name of a parameter of an adapted model: the base's own, and peft's as its files have them."""
    return (
        name.replace(".base_layer.", ".")
        .replace(f".lora_A.{_NAME}.", ".lora_A.")
        .replace(f".lora_B.{_NAME}.", ".lora_B.")
    )
