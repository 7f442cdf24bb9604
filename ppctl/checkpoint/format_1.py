"""Checkpoints of format 1: torch's distributed checkpoint (DCP), with a SHA-256 of each tensor in the manifest.

Read for one release, and never written. A tensor is read whole.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_with_dcp

from ppctl.checkpoint.dcp_metadata import read_metadata
from ppctl.checkpoint.manifest import Manifest, damaged
from ppctl.checkpoint.shards import values_of
from ppctl.errors import CheckpointError


class Reader:
    """Reads whole tensors of one checkpoint by canonical global name, each compared with its record."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._storage = _Storage(path)
        self._last: tuple[str, Tensor] | None = None

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU; the last one is kept. Raises CheckpointError (PP-E503) where it was not saved so."""
        if self._last is None or self._last[0] != name:
            self._last = None  # its memory is free for the next
            self._last = name, self._read(name)
        return self._last[1]

    def _read(self, name: str) -> Tensor:
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="torch.distributed is disabled")
                load_with_dcp({name: tensor}, storage_reader=self._storage, no_dist=True)
        except CheckpointException as failed:
            _, (error, _) = next(iter(failed.failures.items()))
            raise CheckpointError(damaged(self.path, f"{name} cannot be read ({error})")) from failed
        if hashlib.sha256(values_of(tensor)).hexdigest() != record.sha256:
            raise CheckpointError(damaged(self.path, f"{name} cannot be read (its SHA-256 differs)"))
        return tensor


class _Storage(FileSystemReader):
    """Reads `.metadata`, which lists all tensors, once and not for each of them; of the tensors alone.

    torch would run what the pickle says, and load other entries than tensors as pickles, too.
    """

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """What the checkpoint holds, and where."""
        if self._kept is None:
            found = read_metadata(Path(self.path))
            entries = found.state_dict_metadata.items()
            found.state_dict_metadata = {key: each for key, each in entries if isinstance(each, TensorStorageMetadata)}
            found.storage_meta = StorageMeta(load_id=self.load_id)
            self._kept = found
        return self._kept

    _kept: Metadata | None = None
