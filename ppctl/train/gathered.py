"""The weights of one rank whose data-parallel ranks share them too: whole only while a stage computes (decision 21).

Knows stages by their parameters' names. Must not know the schedule: who runs it says when a stage begins and ends.
Between steps a rank has its parts of the float32 masters and moments, and nothing else of a weight.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ppctl.parallel.shard import Coming, start_gather
from ppctl.train.sharded import GroupOf, ShardedWeights


class GatheredWeights(ShardedWeights):
    """As `ShardedWeights`, whose model weights are there from `hold(stage)` to `release(stage)`, once a step.

    `begin` and `hold` are collectives of the groups that share the stage's parameters: all ranks call in one order.
    """

    def __init__(
        self, stages: Mapping[int, Iterable[str]], model: Mapping[str, nn.Parameter], group_of: GroupOf
    ) -> None:
        super().__init__(model, group_of)
        self.stages = {stage: list(names) for stage, names in stages.items()}
        self._coming: dict[int, list[tuple[list[str], Coming]]] = {}
        self._held: set[int] = set()
        self._nothing = {name: _nothing(parameter) for name, parameter in model.items()}
        self.release_all()

    def publish(self) -> None:
        """Nothing: the next step gathers what the masters are by then."""

    @torch.no_grad()
    def begin(self, stage: int) -> None:
        """Start gathering the stage's weights, and return; nothing where they are here or on their way."""
        if stage in self._held or stage in self._coming:
            return
        self._coming[stage] = [(names, self._start(names)) for names in self.buckets(self.stages[stage])]

    @torch.no_grad()
    def hold(self, stage: int) -> None:
        """Return once the stage's weights are whole."""
        if stage in self._held:
            return
        self.begin(stage)
        coming = self._coming.pop(stage)
        self._held.add(stage)
        while coming:  # what was gathered is freed bucket by bucket
            names, bucket = coming.pop(0)
            bucket.into(self._made(name) for name in names)
            del bucket

    def release(self, stage: int) -> None:
        """Forget the stage's weights, behind its last backward."""
        self._held.discard(stage)
        for name in self.stages[stage]:
            self.model[name].data = self._nothing[name]

    @contextmanager
    def all_held(self) -> Iterator[None]:
        """All stages' weights are whole inside."""
        for stage in self.stages:
            self.hold(stage)
        yield
        self.release_all()

    def release_all(self) -> None:
        """Forget all weights, where no backward follows."""
        for stage in self.stages:
            self.release(stage)

    def _start(self, names: Sequence[str]) -> Coming:
        parts = [self.master[name].data for name in names]
        return start_gather(parts, self.model[names[0]].dtype, self.group_of(names[0]))

    def _made(self, name: str) -> Tensor:
        """Memory for a weight, which is the model's from now on."""
        parameter = self.model[name]
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        return parameter.data


def _nothing(parameter: Tensor) -> Tensor:
    """A tensor of the same shape that takes no memory, and that nobody can compute with unnoticed."""
    return torch.full((), torch.nan, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
