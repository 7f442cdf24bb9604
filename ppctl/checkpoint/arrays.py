"""Tensors of a checkpoint as numpy arrays, box by box and without torch, and the differences between two checkpoints.

numpy lacks bfloat16 and 8-bit floats: ml_dtypes adds them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ppctl.checkpoint.boxes import Box, boxes_of_run
from ppctl.checkpoint.chunks import ChunkReader
from ppctl.checkpoint.manifest import Manifest, TensorRecord
from ppctl.checkpoint.tensor_parts import DTYPES, in_order, text_of

_BLOCK = 2**22
"""Elements that are compared at a time."""


class ArrayReader(ChunkReader):
    """Reads boxes of tensors of one checkpoint."""

    def box(self, name: str, box: Box) -> NDArray[Any]:
        """Return the values of a box. Raises CheckpointError (PP-E503) if they are not what was saved, and OSError."""
        out = np.empty(box.shape, numpy_dtype(self.manifest.tensors[name].dtype))
        for piece in self.pieces(name, box):
            out[piece.place] = np.frombuffer(piece.data, out.dtype).reshape(piece.shape)[piece.taken]
        return out


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype with torch's name `name`."""
    return np.dtype(getattr(ml_dtypes, name, name))


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference of a tensor that both checkpoints have, with unequal bits, dtypes or shapes."""

    name: str
    kinds: tuple[str, str]
    """The dtype and shape in each checkpoint, such as `float32[4, 8]`. If shapes differ, the other fields are empty."""
    different: int = 0
    """The number of elements that differ, out of `elements`."""
    elements: int = 0
    at: tuple[int, ...] = ()
    """The index of the first element that differs; `values` has its values in both checkpoints."""
    values: tuple[float, float] = (math.nan, math.nan)
    norm: float = math.nan
    """The norm of the difference (the second tensor minus the first), in float64."""
    relative: float = math.nan
    """The norm of the difference over the norm of the first tensor."""
    largest: float = math.nan
    """The largest absolute difference of an element."""


@dataclass(frozen=True, slots=True)
class CheckpointDifferences:
    """The differences between two checkpoints; names are in the model's order."""

    missing: list[str]
    """The names of tensors that only the first checkpoint has."""
    new: list[str]
    """The names of tensors that only the second checkpoint has."""
    different: list[TensorDifference]
    equal: int
    """The number of tensors with equal bits."""

    @property
    def same(self) -> bool:
        """Whether both checkpoints have the same tensors with the same bits."""
        return not (self.missing or self.new or self.different)


def bytes_to_compare(first: Manifest, second: Manifest) -> int:
    """Return how many bytes of the first checkpoint's values `compare` reads at most (it skips unequal shapes)."""
    names = first.tensors.keys() & second.tensors.keys()
    unlike = [first.tensors[name] for name in names if not _alike(first.tensors[name], second.tensors[name])]
    return sum(math.prod(record.shape) * DTYPES[record.dtype][1] for record in unlike)


def compare(
    first: ArrayReader, second: ArrayReader, progress: Callable[[int], None] = lambda size: None
) -> CheckpointDifferences:
    """Compare all tensors of two checkpoints of any cut.

    Tensors with the same digests of the same boxes are equal without being read; other tensors are read in blocks.
    `progress` is called with the number of the first checkpoint's bytes in each block. Raises CheckpointError (PP-E503)
    if values are not what was saved, and OSError.
    """
    ours, theirs = first.manifest.tensors, second.manifest.tensors
    different = []
    both = sorted(ours.keys() & theirs.keys(), key=in_order)
    for name in both:
        if not _alike(ours[name], theirs[name]) and (one := _difference(name, first, second, progress)):
            different.append(one)
    missing, new = (sorted(a.keys() - b.keys(), key=in_order) for a, b in ((ours, theirs), (theirs, ours)))
    return CheckpointDifferences(missing, new, different, len(both) - len(different))


def _alike(one: TensorRecord, other: TensorRecord) -> bool:
    digests = [{shard.box: shard.digests for shard in record.shards} for record in (one, other)]
    return (one.shape, one.dtype) == (other.shape, other.dtype) and digests[0] == digests[1]


def _difference(
    name: str, first: ArrayReader, second: ArrayReader, progress: Callable[[int], None]
) -> TensorDifference | None:
    records = [reader.manifest.tensors[name] for reader in (first, second)]
    kinds = (text_of(records[0].shape, records[0].dtype), text_of(records[1].shape, records[1].dtype))
    shape = records[0].shape
    if shape != records[1].shape:
        return TensorDifference(name, kinds)
    count, at, values = 0, tuple[int, ...](), (math.nan, math.nan)
    squares, whole, largest = 0.0, 0.0, 0.0
    for block in _blocks(shape):
        a, b = first.box(name, block), second.box(name, block)
        progress(a.nbytes)
        unlike = unequal(a, b)
        wide, other = a.astype(np.float64), b.astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            apart = np.where(unlike, other - wide, 0.0)
            squares, whole = squares + float(np.sum(apart * apart)), whole + float(np.sum(wide * wide))
            largest = float(np.maximum(largest, np.max(np.abs(apart), initial=0.0)))
        if not count and unlike.any():
            place = np.unravel_index(int(np.argmax(unlike)), block.shape)
            at = tuple(int(index) + begin for index, begin in zip(place, block.offset, strict=True))
            values = (float(wide[place]), float(other[place]))
        count += int(np.count_nonzero(unlike))
    if not count and kinds[0] == kinds[1]:
        return None
    norm = math.sqrt(squares)
    relative = norm / math.sqrt(whole) if whole else math.nan
    return TensorDifference(name, kinds, count, math.prod(shape), at, values, norm, relative, largest)


def unequal(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.bool_]:
    """Return for each element whether two arrays differ there: in bits, or as numbers if their dtypes differ."""
    if a.dtype != b.dtype:
        return np.asarray(a.astype(np.float64) != b.astype(np.float64))
    bits = np.dtype(f"u{a.dtype.itemsize}")
    return np.asarray(a.view(bits) != b.view(bits))


def _blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    for start in range(0, math.prod(shape), _BLOCK):
        yield from boxes_of_run(shape, start, min(start + _BLOCK, math.prod(shape)))
