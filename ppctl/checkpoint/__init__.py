"""Checkpoints by canonical global name: atomic, verified, and readable in any cut of the pipeline."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppctl.checkpoint.manifest import read_state, verify
from ppctl.checkpoint.replicas import Tensors

if TYPE_CHECKING:
    from ppctl.checkpoint.reading import load
    from ppctl.checkpoint.writing import save

_LATER = {"load": "ppctl.checkpoint.reading", "save": "ppctl.checkpoint.writing"}
"""What needs torch's checkpoint library, which takes nearly as long to import as torch: no first step waits for it."""

__all__ = ["Tensors", "load", "read_state", "save", "verify"]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
