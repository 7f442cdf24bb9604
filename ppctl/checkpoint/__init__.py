"""Checkpoints by canonical global name: atomic, verified, and readable in any cut of the model.

boxes, shards      which part of a tensor, and its values; holders: who holds and who writes it
shard_file         the file of a rank; manifest: what is in all of them; state: what is beside tensors; names: lists of
                   tensors for people
format_1           the old format, torch's; dcp_metadata: the index of torch's formats, without running it
saver              the order of a save; disk: its work on the file system
background         a save beside training (decision 50), from host_memory, by the node's writer
local_copy         copies in memory that outlive the process (decision 51); local_copies: on all hosts
reading            loading, one tensor at a time (streaming)
agreement          one result or one error for all ranks
verification       what is wrong with a checkpoint; arrays and chunks: its values without torch
gradients          what `log.gradients` keeps of a step; step_parity compares two runs (decision 58)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppctl.checkpoint.manifest import read_manifest
    from ppctl.checkpoint.reading import CheckpointReader, load
    from ppctl.checkpoint.saver import Saver, save
    from ppctl.checkpoint.shards import Shard, whole_shards
    from ppctl.checkpoint.state import read_state
    from ppctl.checkpoint.verification import verify

_HOME_OF = {
    "CheckpointReader": "reading",
    "Saver": "saver",
    "Shard": "shards",
    "load": "reading",
    "read_manifest": "manifest",
    "read_state": "state",
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
