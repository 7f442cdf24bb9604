"""Adapters in a model of transformers: the only importer of peft.

Knows how peft names what it adds. Must not know stages, ranks or files.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ppctl.errors import ConfigError, Problem
from ppctl.geometry.foreign_model import Adapters

_NAME = "default"
"""peft's own name of a model's only adapter."""


def add_adapters(model: nn.Module, adapters: Adapters, dtype: torch.dtype) -> nn.Module:
    """Put peft's modules around the targets and freeze all else; adapters are as wide as the weights.

    Raises ConfigError: PP-E541 where peft is not here, PP-E542 in its own words for modules that it does not adapt.
    """
    try:
        import peft
    except ImportError as missing:
        message = f"peft cannot be imported: {missing}"
        raise ConfigError(Problem("PP-E541", message, "pip install 'ppctl[lora]'", "model.lora")) from missing
    alpha: Any = adapters.alpha  # any number, which peft divides by the rank
    config = peft.LoraConfig(
        r=adapters.rank,
        lora_alpha=alpha,
        target_modules=list(adapters.targets),
        lora_dropout=0.0,
        bias="none",
        init_lora_weights=False,
    )
    try:
        found: Any = peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    except ValueError as error:
        message = f"peft has no adapter for a module that model.lora.targets names: {str(error).splitlines()[0]}"
        raise ConfigError(Problem("PP-E542", message, "'model.lora.targets=[q_proj,v_proj]'", "model.lora")) from error
    for parameter in found.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)
    adapted: nn.Module = found
    return adapted


def canonical(name: str) -> str:
    """The canonical name of a parameter of an adapted model: the base's own, and peft's as its files have them."""
    return (
        name.replace(".base_layer.", ".")
        .replace(f".lora_A.{_NAME}.", ".lora_A.")
        .replace(f".lora_B.{_NAME}.", ".lora_B.")
    )
