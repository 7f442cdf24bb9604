"""Adapters in a transformers model: the only importer of peft."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.errors import ConfigError, Problem, pasted, pip_install
from ppctl.foreign.miniature import line_of
from ppctl.geometry.adapters import is_adapter, trained_whole
from ppctl.geometry.foreign_model import Adapters, Anatomy
from ppctl.model.dropout import Draws, Dropout

_NAME = "default"
"""peft's own name of a model's only adapter."""


def add_adapters(model: nn.Module, adapters: Adapters, anatomy: Anatomy, dtype: torch.dtype) -> nn.Module:
    """Put peft's modules around the targets of `model` in place, freeze all else except modules trained whole, and give
    the adapters `dtype`; return the model. Raises ConfigError: PP-E540 for modules that are missing or cannot be
    adapted or trained whole, PP-E541 without peft, PP-E542 in peft's words for modules that peft does not adapt."""
    try:
        import peft
    except ImportError as missing:
        message = f"peft cannot be imported: {missing}"
        raise ConfigError(Problem("PP-E541", message, pip_install("ppctl[lora]"), "model.lora")) from missing
    alpha: Any = adapters.alpha  # any number, which peft divides by the rank
    config = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=alpha,
        target_modules=_modules(model, adapters, anatomy),
        bias="none",
        init_lora_weights=False,
    )
    try:
        with warnings.catch_warnings():  # peft warns that it transposes GPT-2's matrices
            warnings.simplefilter("ignore")
            injected: Any = peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    except (ValueError, TypeError, NotImplementedError) as error:
        message = f"peft cannot adapt a module of model.lora.targets: {line_of(error)}"
        remedy = pasted(f"model.lora.targets=[{','.join(_known(model, anatomy)[:2])}]")
        raise ConfigError(Problem("PP-E542", message, remedy, "model.lora")) from error
    for parameter in injected.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    adapted: nn.Module = injected
    _train_whole(adapted, adapters, anatomy)
    for module in [*adapted.modules()] if adapters.dropout else ():
        if isinstance(drops := getattr(module, "lora_dropout", None), nn.ModuleDict):
            drops[_NAME] = AdapterDropout(adapters.dropout)
    return adapted


class AdapterDropout(Dropout):
    """Dropout of an adapter's input [b, s, width], by the `draws` that the layer around it sets (`_OwnLayer`)."""

    draws: Draws | None = None

    def forward(self, x: Tensor, draws: Draws | None = None) -> Tensor:
        """`x` with elements dropped; unchanged without draws. Raises ConfigError (PP-E540) for rows without places."""
        if x.dim() != 3:
            message = f"model.lora.dropout needs places in samples, but a target gets rows {list(x.shape)} without them"
            raise ConfigError(Problem("PP-E540", message, "model.lora.dropout=0", "model.lora"))
        return super().forward(x, self.draws)


def _train_whole(adapted: nn.Module, adapters: Adapters, anatomy: Anatomy) -> None:
    """Let the modules of `modules_to_save` be trained. Raises ConfigError (PP-E540) for names that match no weight, or
    a module with an adapter or shared weights, which peft treats differently."""
    names = {canonical(name): parameter for name, parameter in adapted.named_parameters(remove_duplicate=False)}
    remedy = "model.lora.modules_to_save=null"
    for module in adapters.modules_to_save:
        chosen = [name for name in names if trained_whole(name, adapters._replace(modules_to_save=(module,)))]
        what = f"modules_to_save: {module}"
        if not chosen:
            raise _wrong(f"modules_to_save: no module with weights has a name that ends in {module}", remedy)
        if held := next(filter(is_adapter, chosen), None):
            raise _wrong(f"{what} has an adapter in it: {held}", remedy)
        if anatomy.tied and {*chosen} & {*anatomy.uses}:
            raise _wrong(
                f"{what} has a shared weight: {' and '.join(anatomy.uses)} are the same tensor in this model", remedy
            )
        for name in chosen:
            names[name].requires_grad_(True)


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
    """The last parts of the names of linear modules, including GPT-2's Conv1D, without routers."""
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
    names = {canonical(name): tuple(each.shape) for name, each in adapted.named_parameters()}
    return {name: shape for name, shape in names.items() if is_adapter(name)}


def canonical(name: str) -> str:
    """The canonical name of an adapted model's parameter: the base's, or for adapters the name in peft's files."""
    return (
        name.replace(".base_layer.", ".")
        .replace(f".lora_A.{_NAME}.", ".lora_A.")
        .replace(f".lora_B.{_NAME}.", ".lora_B.")
    )
