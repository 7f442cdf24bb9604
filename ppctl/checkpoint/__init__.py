"""Checkpoints by canonical global name: atomic, verified, and readable in any cut of the model."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppctl.checkpoint.manifest import read_manifest, read_state
    from ppctl.checkpoint.reading import CheckpointReader, load
    from ppctl.checkpoint.saver import Saver, save
    from ppctl.checkpoint.shards import Shard, whole_shards
    from ppctl.checkpoint.verification import verify

_HOME_OF = {
    "CheckpointReader": "reading",
    "Saver": "saver",
    "Shard": "shards",
    "load": "reading",
    "read_manifest": "manifest",
    "read_state": "manifest",
    "save": "saver",
    "verify": "verification",
    "whole_shards": "shards",
}
"""The files in which the names live; those of the manifest and of verification need no torch."""

__all__ = [
    "CheckpointReader",
    "Saver",
    "Shard",
    "load",
    "read_manifest",
    "read_state",
    "save",
    "verify",
    "whole_shards",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"ppctl.checkpoint.{_HOME_OF[name]}"), name)
