"""Checkpoints written and read by one process that never holds more than one tensor.

Knows torch's distributed checkpoint (DCP). Must not know models, nor where tensors come from or go to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp
from torch.distributed.checkpoint.state_dict_saver import save as save_with_dcp

from ppctl import checkpoint_folder
from ppctl.checkpoint.manifest import Manifest, TensorRecord
from ppctl.checkpoint.replicas import record_tensor
from ppctl.checkpoint.writing import Writer, seal, sync_files, without_warning
from ppctl.errors import CheckpointError, Problem

Read = Callable[[str], Tensor]


class _Lazy(DefaultSavePlanner):
    """Reads each tensor just before it is written, and keeps its record."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read
        self.records: dict[str, TensorRecord] = {}

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The tensor of one item of the plan; one process writes it whole."""
        name = write_item.index.fqn
        tensor = self.read(name)
        self.records[name] = record_tensor(tensor)
        return tensor


def save_streamed(
    directory: Path, step: int, tensors: Mapping[str, Tensor], read: Read, state: Mapping[str, Any]
) -> Path:
    """Write `directory`/step-`step` from one process; returns its path.

    `tensors` are on the meta device, for shapes and dtypes by canonical global name; `read` is called for each once.
    Raises what `read` raises, and OSError; then, as after a crash, nothing is left that would be read.
    """
    planner = _Lazy(read)
    temporary = checkpoint_folder.prepare(directory, step)
    try:
        without_warning(
            lambda: save_with_dcp(dict(tensors), storage_writer=Writer(temporary), planner=planner, no_dist=True)
        )
        files = sync_files(temporary, "__*.distcp")
        seal(temporary, Manifest(step, files, planner.records), json.dumps(dict(state), indent=1) + "\n")
        return checkpoint_folder.publish(directory, step)
    except CheckpointException as failed:
        checkpoint_folder.discard(temporary)
        raise _cause(failed) from failed
    except BaseException:
        checkpoint_folder.discard(temporary)
        raise


class CheckpointReader:
    """Reads tensors of one checkpoint by canonical global name, each compared with its record."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._storage = _Storage(path)

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError (PP-E503) where it is not what was saved."""
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        try:
            without_warning(lambda: load_with_dcp({name: tensor}, storage_reader=self._storage, no_dist=True))
        except CheckpointException as failed:
            raise CheckpointError(_damaged(self.path, name, str(_cause(failed)))) from failed
        if record_tensor(tensor) != record:
            raise CheckpointError(_damaged(self.path, name, "its SHA-256 differs"))
        return tensor


class _Storage(FileSystemReader):
    """Reads `.metadata`, which lists all tensors, once and not for each of them."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds, and where."""
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept

    _kept: Metadata | None = None


def _cause(failed: CheckpointException) -> BaseException:
    _, (error, _) = next(iter(failed.failures.items()))
    return error


def _damaged(path: Path, name: str, why: str) -> Problem:
    return Problem("PP-E503", f"the checkpoint at {path} is damaged: {name} cannot be read ({why})", f"ls '{path}'")
