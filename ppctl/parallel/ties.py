"""Tied parameters: one accumulator per use, summed once after the last microbatch in canonical order of uses.

Knows which rank holds each use and a small process group. Must not know what is tied or why. All uses start equal, get
the same sum and take the same optimizer step, so they stay bit-equal without ever being copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ppctl.comm.groups import make_group


class TiedUse(NamedTuple):
    """A use of a shared parameter: the global rank that holds it, and the use's canonical name there."""

    rank: int
    name: str


class TiedGradients:
    """Gives every use of a shared parameter the sum over all its uses.

    `uses` are in canonical order and the same on every rank; `rank` is this one. A rank that holds none takes no part.
    The sum is ((first + second) + third), wherever the uses live, so its bits do not depend on the cut.
    """

    def __init__(self, uses: Sequence[TiedUse], masters: Mapping[str, nn.Parameter], rank: int) -> None:
        self.uses = tuple(uses)
        self.own = {use.name: masters[use.name] for use in uses if use.rank == rank}
        ranks = sorted({use.rank for use in uses})
        self.group: dist.ProcessGroup | None = None
        if self.own and len(ranks) > 1:
            self.group = make_group([tuple(ranks)])

    @torch.no_grad()
    def sum(self) -> None:
        """Replace the gradient of each use held here by the sum; call after the data-parallel reduction."""
        if not self.own:
            return
        some = next(iter(self.own.values()))
        total: torch.Tensor | None = None
        for use in self.uses:
            gradient = self.own[use.name].grad if use.name in self.own else None
            part = torch.zeros_like(some) if gradient is None else gradient.contiguous()
            if self.group is not None:
                dist.broadcast(part, src=use.rank, group=self.group)
            total = part.clone() if total is None else total.add_(part)
        for parameter in self.own.values():
            parameter.grad = total.clone() if total is not None else None
