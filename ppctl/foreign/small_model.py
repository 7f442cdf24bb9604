"""A miniature as a model with weights, and why none can be made of a config.

Knows in which order reasons are looked for, the cheapest and plainest first. Must not know stages.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.foreign.anatomy import CannotCut, structure, survey
from ppctl.foreign.library import ConfigFails, make_model
from ppctl.foreign.miniature import miniatures
from ppctl.geometry.foreign_model import Anatomy
from ppctl.geometry.rows import Start

_MOST_PARAMETERS = 100_000_000
"""Of a miniature: more would take minutes, and memory that a login node does not have."""
CODE_FAILS = (
    *(RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, ImportError),
    ConfigFails,
)
"""What a model's own code raises where its sizes do not go together, or something that it reads is not there."""


def small_model(config: Any) -> tuple[nn.Module, nn.Module, Anatomy, dict[str, Start]]:
    """The smallest miniature that runs: on meta, with weights, its anatomy, and how its weights began.

    Raises CannotCut: for a config of which transformers makes no model, for what stands against a cut by its structure,
    and where no sizes are found with which the model's own code runs.
    """
    _check_code(config)
    failed: Exception | None = None
    for small in miniatures(config):
        try:
            blank = make_model(small, "meta").train()
            structure(blank)
            if (number := sum(parameter.numel() for parameter in blank.parameters())) > _MOST_PARAMETERS:
                failed = failed or ValueError(f"it has {number:,} parameters, most of them in {_largest(blank)}")
                continue
            torch.manual_seed(0)
            whole = make_model(small, "cpu").train()
            starts = {name: _start(tensor) for name, tensor in whole.state_dict().items()}
            _shake(whole)
            return blank, whole, survey(whole), starts
        except CODE_FAILS as error:
            failed = failed or error
    assert failed is not None  # a miniature was tried
    raise CannotCut(f"its small copy, on which the cut is tried, cannot be made: {line_of(failed)}") from failed


def _check_code(config: Any) -> None:
    """Refuse a config of which the model's own code makes no model. Raises CannotCut."""
    try:
        make_model(config, "meta")
    except CODE_FAILS as error:
        reason = f"transformers cannot build a model from this config: {line_of(error)}"
        raise CannotCut(f"{reason} ({_place(error)})") from error


def _place(error: BaseException) -> str:
    """Where a model's own code failed: the class or function that was running, and its file."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.name} in {Path(last.filename).name}, line {last.lineno}"


def _largest(model: nn.Module) -> str:
    """The child of a model that has most of its parameters, with its class."""
    sizes = {
        path: sum(each.numel() for each in module.parameters(recurse=False)) for path, module in model.named_modules()
    }
    path = max(sizes, key=lambda each: sizes[each])
    return f"{path} ({type(model.get_submodule(path)).__name__})"


def _start(tensor: Tensor) -> Start:
    """Constants stay what they are in any size; all else is drawn."""
    return "ones" if bool((tensor == 1).all()) else "zeros" if bool((tensor == 0).all()) else "normal"


def _shake(model: nn.Module) -> None:
    """Move every parameter off its start: biases of zeros and norms of ones would hide that they are mixed up."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def line_of(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
