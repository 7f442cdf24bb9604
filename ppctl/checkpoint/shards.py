"""What a rank holds of a checkpoint's tensors: boxes by canonical global name, with their values.

Must not know which other ranks hold them (`holders`), why several do, nor files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.shard_file import Part


class Shard(NamedTuple):
    """A box of a tensor as this rank holds it."""

    name: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offset: tuple[int, ...]
    """Of the box's first element in it."""
    tensor: Tensor
    """Of the box's shape: a view of what training uses, or a buffer of it."""

    @property
    def part(self) -> Part:
        """What it is, without the values."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return Part(self.name, tuple(self.shape), dtype, Box(tuple(self.offset), tuple(self.tensor.shape)))


Tensors = Mapping[str, Tensor | Sequence[Tensor]]
"""Canonical global name -> the whole tensor, or all the copies of it that this rank holds."""


def whole_shards(tensors: Tensors) -> list[Shard]:
    """Shards of tensors that this rank holds whole."""
    return [
        Shard(name, tuple(each.shape), (0,) * each.dim(), each)
        for name, value in tensors.items()
        for each in ((value,) if isinstance(value, Tensor) else value)
    ]


def values_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, row-major: no copy where it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
