"""Two checkpoints compared, of which one may be of format 1: its values are read with torch alone.

Knows readers of both formats. Must not know what is shown.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ppctl.checkpoint import format_1
from ppctl.checkpoint.arrays import ArrayReader, BoxReader, Compared, compare
from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.manifest import Manifest, read_manifest
from ppctl.checkpoint.shards import values_of


class _FirstFormat:
    """Boxes of a checkpoint of format 1. Holds one whole tensor."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest = manifest
        self._reader = format_1.Reader(path, manifest)

    def box(self, name: str, box: Box) -> NDArray[Any]:
        """Raises CheckpointError (PP-E503) where the tensor is not what was saved."""
        record = self.manifest.tensors[name]
        part = self._reader.tensor(name)[box.within((0,) * len(record.shape))].contiguous()
        return np.frombuffer(values_of(part), np.dtype(getattr(ml_dtypes, record.dtype, record.dtype))).reshape(
            box.shape
        )


def compare_any(first: Path, second: Path) -> Compared:
    """As `ppctl.checkpoint.arrays.compare`."""
    return compare(_reader(first), _reader(second))


def _reader(path: Path) -> BoxReader:
    manifest = read_manifest(path)
    return _FirstFormat(path, manifest) if manifest.format == 1 else ArrayReader(path, manifest)
