"""Equal parts of tensors over a process group: sums that arrive in parts, and parts that become whole again.

Knows tensors and a group. Must not know what they mean. A tensor is read flat, padded to a multiple of the group's
size n, and cut into n runs; rank r holds the r-th. Every rank of the group makes the same calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# torch renamed both in 2.13.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Arriving(NamedTuple):
    """Sums on their way."""

    work: dist.Work | None
    flat: Tensor
    widths: list[int]

    def wait(self) -> list[Tensor]:
        """This rank's part of each sum."""
        if self.work is not None:
            self.work.wait()
        return list(self.flat.split(self.widths))


def width(tensor: Tensor, size: int) -> int:
    """Elements of one part."""
    return -(-tensor.numel() // size)


def part_of(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    """This rank's part [width], a copy."""
    return _rows(tensor, group.size())[group.rank()].clone()


def scatter_sums(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Arriving:
    """Start summing tensors of one dtype over the group; they may be freed or overwritten at once."""
    size = group.size()
    flat = torch.cat([_rows(tensor, size) for tensor in tensors], dim=1).flatten()
    own = flat.new_empty(flat.numel() // size)
    work = _reduce_scatter(own, flat, group=group, async_op=True)
    return Arriving(work, own, [width(tensor, size) for tensor in tensors])


def gather_into(wholes: Sequence[Tensor], parts: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Fill tensors of one dtype from the parts that the ranks hold, rounded to that dtype before they travel."""
    own = torch.cat([part.to(wholes[0].dtype) for part in parts])
    flat = own.new_empty(group.size() * own.numel())
    _all_gather(flat, own, group=group)
    rows = flat.view(group.size(), -1).split([part.numel() for part in parts], dim=1)
    for whole, row in zip(wholes, rows, strict=True):
        whole.copy_(row.reshape(-1)[: whole.numel()].view_as(whole))


def _rows(tensor: Tensor, size: int) -> Tensor:
    """The parts of all ranks, [size, width], zeros behind the end."""
    padding = size * width(tensor, size) - tensor.numel()
    return torch.nn.functional.pad(tensor.reshape(-1), (0, padding)).view(size, -1)
