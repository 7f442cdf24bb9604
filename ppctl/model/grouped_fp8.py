"""Products of all groups' rows with their weights at once, in 8 bits with a scale for each row (decision 89).

Operands are as torch's scaled grouped product wants them (`linear.py` calls it). The numbers are those of one product
for each group (`Fp8.multiply`), rounded with the same scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ppctl.model.fp8 import ALIGNED, E4M3, Fp8, scales_of


class Groups(NamedTuple):
    """Where the rows of groups lie in memory: each group begins at a multiple of 16 rows, and has at least 16.

    A sum over a group's rows reads them in whole 16 bytes, and the product takes no empty group.
    """

    ends: Tensor
    """int32 [groups]: the row before which each group ends."""
    places: Tensor
    """int64 [n]: where each row lies."""
    blocks: Tensor
    """int64 [size / 16]: the group of every 16 rows; behind the last group, the number of groups."""

    @classmethod
    def of(cls, counts: Tensor, rows: int) -> Groups:
        """For groups of `counts` [groups] (int64) rows, in sum `rows`; the host need not know the counts."""
        device, size = counts.device, -(-rows // ALIGNED) + len(counts)
        blocks = (counts.clamp(min=1) + ALIGNED - 1) // ALIGNED
        ends = blocks.cumsum(0)
        shift = (ends - blocks) * ALIGNED - (counts.cumsum(0) - counts)
        places = torch.arange(rows, device=device) + shift.repeat_interleave(counts, output_size=rows)
        own = torch.searchsorted(ends, torch.arange(size, device=device), right=True)
        return cls((ends * ALIGNED).int(), places, own)

    def down(self, rows: Tensor) -> Tensor:
        """The rows [n, ...], read from their places in [size, ...]. `row_copies` calls this and its reverse, `up`."""
        return rows.index_select(0, self.places)

    def up(self, rows: Tensor) -> Tensor:
        """Rows [n, ...] at their places, [size, ...], with zeros between."""
        return rows.new_zeros(len(self.blocks) * ALIGNED, *rows.shape[1:]).index_copy_(0, self.places, rows)

    def along_rows(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """A matrix [size, k] transposed in e4m3, [k, size], and the scales of its columns in each group, [groups x k].

        Zeros between groups change no scale. What lies behind the last group has scales of its own, which are dropped.
        """
        groups, blocks = len(self.ends), matrix.view(len(self.blocks), ALIGNED, -1)
        largest = torch.linalg.vector_norm(blocks, torch.inf, 1).float()
        of_groups = largest.new_zeros(groups + 1, largest.shape[1])
        of_groups.scatter_reduce_(0, self.blocks[:, None].expand_as(largest), largest, "amax")
        scales = scales_of(of_groups, E4M3)
        quotients = torch.div(blocks, scales[self.blocks][:, None]).flatten(0, 1)
        return quotients.t().to(E4M3, memory_format=torch.contiguous_format), scales[:groups].flatten()


class EightBitCopies(NamedTuple):
    """A stack of weights [groups, out, in] in 8 bits, in the two layouts that its products read."""

    ahead: tuple[Tensor, Tensor]
    """e4m3 [groups, out, in], and a scale for each row, float32 [groups, out]."""
    back: tuple[Tensor, Tensor]
    """The transposes [groups, in, out], and scales [groups, in]."""


_made: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Stack of weights -> (its version, its copies): they are made when a step first needs them."""


def all_copies() -> Iterator[Tensor]:
    """The memory of all copies that there are."""
    return (tensor for _, copies in _made.values() for pair in copies for tensor in pair)


def copies_of(weights: Tensor, fp8: Fp8) -> EightBitCopies:
    """The copies of a parameter [groups, out, in], made anew after every change of it (an update, a load)."""
    version, made = _made.get(weights, (None, None))
    if version != weights._version:
        _made.pop(weights, None)
        del made  # before the new ones take memory
        both = [(fp8.weight(one), fp8.weight(one.t())) for one in weights.detach()]  # one group is wide at a time
        ahead, back = (
            (torch.stack([one.values for one in each]), torch.stack([one.scales[:, 0] for one in each]))
            for each in zip(*both, strict=True)
        )
        made = EightBitCopies(ahead, back)
        _made[weights] = weights._version, made
    return cast(EightBitCopies, made)


class GroupsInFp8(NamedTuple):
    """A product in 8 bits of all groups' rows, as `Groups.up` has them, with the copies of their weights."""

    fp8: Fp8
    copies: EightBitCopies

    def multiply(self, rows: Tensor, _: Tensor, bias: None, values: Tensor, scales: Tensor, *groups: Tensor) -> Tensor:
        """The product [size, out]; behind the last group it is whatever was in its memory."""
        return self._product(rows.dtype, values, scales.flatten(), *self.copies.ahead, Groups(*groups).ends)

    def of_input(self, gradient: Tensor, _: None, weights: Tensor, *kept: Tensor) -> Tensor:
        """The gradient of the rows [size, in]; behind the last group it is whatever was in its memory."""
        rounded, ends = self.fp8.gradient(gradient), Groups(*kept[2:]).ends
        return self._product(gradient.dtype, rounded.values, rounded.scales.flatten(), *self.copies.back, ends)

    def of_weight(self, gradient: Tensor, _: None, weights: Tensor, *kept: Tensor) -> Tensor:
        """The gradient of the weights [groups, out, in]."""
        (values, scales, *groups) = kept
        own = Groups(*groups)
        rows = values.float().mul_(scales)
        return self._product(gradient.dtype, *own.along_rows(gradient), *own.along_rows(rows), own.ends)

    def _product(self, dtype: torch.dtype, *operands: Tensor) -> Tensor:
        assert self.fp8.multiply_groups is not None  # groups were chosen to go at once
        return self.fp8.multiply_groups(*operands).to(dtype)
