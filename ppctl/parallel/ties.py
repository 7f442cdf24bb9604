"""Parameters that several stages share: every use accumulates its own gradient; their sum is made once a step.

All uses start equal, get the same sum and take the same optimizer step: they stay bit-equal without ever being copied.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from ppctl.comm.groups import make_group
from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import embedding_uses, uses_of_embedding
from ppctl.plan import StageSpec


class TiedUse(NamedTuple):
    """A use of a shared parameter: the global rank that holds it, and the use's canonical name there."""

    rank: int
    name: str


def tied_uses(stages: Iterable[StageSpec], model: ModelConfig, pipeline: Sequence[int]) -> tuple[TiedUse, ...]:
    """The uses of the token embedding in canonical order (embedding, output, MTP); () if there is only one. `pipeline`
    are the global ranks of the stages' pipeline, by pp_rank."""
    stage_of = {name: spec for spec in stages for name in embedding_uses(model, spec.layers)}
    held = [name for name in uses_of_embedding(model) if name in stage_of]
    uses = tuple(TiedUse(pipeline[stage_of[name].pp_rank], name) for name in held)
    return uses if len(uses) > 1 else ()


class TiedGradients:
    """Gives every use of a shared parameter the sum over all its uses.

    `uses` are in canonical order and equal on every rank; `rank` is this rank. All ranks of the pipeline construct it;
    ranks without a use take no part in sums. The sum is ((first + second) + third), wherever the uses are, so its bits
    do not depend on the cut.
    """

    def __init__(self, uses: Sequence[TiedUse], masters: Mapping[str, nn.Parameter], rank: int) -> None:
        self.uses = tuple(uses)
        self.own = {use.name: masters[use.name] for use in uses if use.rank == rank}
        ranks = sorted({use.rank for use in uses})
        self.group: dist.ProcessGroup | None = None
        if len(ranks) > 1:
            # A rank without a use makes a group of its own: torch names groups by how many a rank has made, and the
            # ranks' next common group would have two names.
            group = make_group([tuple(ranks) if self.own else (rank,)])
            self.group = group if self.own else None

    @torch.no_grad()
    def sum(self) -> None:
        """Replace each held use's gradient by the sum. Every rank with a use calls this, after data-parallel sums."""
        if not self.own:
            return
        some = next(iter(self.own.values()))
        total: torch.Tensor | None = None
        for use in self.uses:
            gradient = self.own[use.name].grad if use.name in self.own else None
            part = torch.zeros_like(some) if gradient is None else gradient.contiguous()
            if self.group is not None:
                dist.broadcast(part, src=use.rank, group=self.group)
            # Into the first gradient's memory: a sent gradient is not needed any more.
            total = part if total is None else total.add_(part)
        for number, parameter in enumerate(self.own.values()):
            parameter.grad = total.clone() if number and total is not None else total
