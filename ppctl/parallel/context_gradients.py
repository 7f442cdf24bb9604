"""Gradients of keys and values on their way to the ranks that own these keys and values (`context`)."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.comm.groups import send_round
from ppctl.comm.turns import hand_over
from ppctl.parallel.exchange_counts import starting
from ppctl.parallel.shard import reduce_scatter
from ppctl.sequence_halves import VisibleBlock
from ppctl.tensors.tensor_halves import to_ranks

Gradients = tuple[VisibleBlock, Tensor, Tensor]
"""Gradients of the keys and of the values that a block used."""


class Hop(NamedTuple):
    """A tensor on its way to the next rank, and one that arrives from the rank before."""

    works: list[dist.Work]
    sent: Tensor
    arriving: Tensor

    @classmethod
    def start(cls, sent: Tensor, group: dist.ProcessGroup) -> Hop:
        """Send to the next rank of the group, and receive as much from the rank before."""
        starting(group)
        works, arriving = send_round(sent, group)
        return cls(works, sent, arriving)

    def wait(self) -> Tensor:
        """Waits for the hop; returns the keys and values that have arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


class GradientSums:
    """Gradients of keys and values on their way to the ranks that these are of; subclasses define the way."""

    def __init__(self, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> None:
        self._own = k.new_zeros(*k.shape[:-1], k.shape[-1] + v.shape[-1])
        """Gradients of the rank's own keys and values, concatenated as they are sent."""
        self._group = group
        self._is_own = True

    def add(self, gradients: list[Gradients]) -> None:
        """Take a part's gradients out of the list and add them; parts come in order, the rank's own first."""
        if self._is_own:
            self._is_own = False
            _add(self._own, gradients)
        else:
            self._add_others(gradients)

    def total(self) -> Tensor:
        """The sum for this rank's own keys and values."""
        raise NotImplementedError

    def _add_others(self, gradients: list[Gradients]) -> None:
        raise NotImplementedError


class RingGradients(GradientSums):
    """Gradients follow the keys and values that they are of, one hop behind, and get every rank's share on the way."""

    _hop: Hop | None = None

    def total(self) -> Tensor:
        """The sum for this rank's own keys and values, after the last hop."""
        if self._hop is not None:
            hand_over()
            self._own += self._hop.wait()
        return self._own

    def _add_others(self, gradients: list[Gradients]) -> None:
        sums = torch.zeros_like(self._own) if self._hop is None else self._hop.wait()
        self._hop = None
        _add(sums, gradients)
        self._hop = Hop.start(sums, self._group)


class ScatteredGradients(GradientSums):
    """Gradients of all ranks' keys and values at once; each rank gets the sum of its own."""

    _sent: Tensor

    def total(self) -> Tensor:
        """The sum for this rank's own keys and values, by a reduce_scatter."""
        scattered = torch.empty_like(self._own)
        starting(self._group)
        work = reduce_scatter(scattered.view(-1), self._sent.view(-1), group=self._group, async_op=True)
        hand_over()
        work.wait()
        self._own += scattered
        return self._own

    def _add_others(self, gradients: list[Gradients]) -> None:
        b, groups, s, width = self._own.shape
        whole = self._own.new_zeros(b, groups, s * self._group.size(), width)
        _add(whole, gradients)
        self._sent = to_ranks(whole, self._group.size(), 2)


def _add(sums: Tensor, gradients: list[Gradients]) -> None:
    while gradients:
        block, of_keys, of_values = gradients.pop()
        of_both = sums[block.rows, :, block.keys]
        of_both[..., : of_keys.shape[-1]] += of_keys
        of_both[..., of_keys.shape[-1] :] += of_values
