"""Plain data parallelism: every dp rank holds the same stages, and their gradients are summed once a step.

The loss is already a share of the global batch's mean, therefore gradients are summed, not averaged. dp changes the
order of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from ppctl.parallel.exchange_counts import starting
from ppctl.topology import BUCKET_ELEMENTS

Item = TypeVar("Item")


class GradientReducer:
    """Sums the gradients of a stage over the ranks that hold it, in flat buckets of one dtype.

    `stages` maps a stage to its parameters (the masters), in an order that is the same on all ranks. Parameters in
    `experts` are held by fewer ranks, and summed over `expert_group`. A group of None (a single rank) sums nothing.
    """

    def __init__(
        self,
        stages: Mapping[int, Iterable[nn.Parameter]],
        group: dist.ProcessGroup | None,
        experts: Iterable[nn.Parameter] = (),
        expert_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.stages = {stage: list(parameters) for stage, parameters in stages.items()}
        self.group = group
        self.experts = set(experts)
        self.expert_group = expert_group
        self._running: list[dist.Work] = []

    @torch.no_grad()
    def reduce(self, stage: int, divisor: float = 1.0) -> None:
        """Divide the stage's gradients by `divisor`, and start summing them beside the rest of the pipeline: once a
        step, after the stage's last backward. Until `finish`, the gradients' values are undefined."""
        own = self.stages[stage]
        for parameter in own if divisor != 1.0 else ():
            if parameter.grad is not None:
                parameter.grad.div_(divisor)
        self._start([p for p in own if p not in self.experts], self.group)
        self._start([p for p in own if p in self.experts], self.expert_group)

    def _start(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
        if group is not None:
            self._running += start_sums(parameters, group)

    def finish(self) -> None:
        """Wait for every reduction started since the last call; then the gradients are the sums."""
        for work in self._running:
            work.wait()
        self._running.clear()


def start_sums(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> list[dist.Work]:
    """Start summing gradients over the group, in buckets; returns the works to wait for. Replaces every `grad` (None
    counts as zeros) by a part of its bucket, undefined until then."""
    works = []
    for bucket in buckets(parameters, nn.Parameter.numel, lambda parameter: parameter.dtype, BUCKET_ELEMENTS):
        flat = _flat([torch.zeros_like(p) if p.grad is None else p.grad for p in bucket])  # all bring the same buckets
        for parameter, part in zip(bucket, torch.split(flat, [p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)  # frees the gradient that was copied
        starting(group)
        works.append(dist.all_reduce(flat, group=group, async_op=True))
    return [work for work in works if work is not None]


def _flat(gradients: list[torch.Tensor]) -> torch.Tensor:
    """The gradients one after another; a single one (a large table's) is not copied."""
    return gradients[0].reshape(-1) if len(gradients) == 1 else torch.cat([each.reshape(-1) for each in gradients])


def buckets(
    items: Iterable[Item], elements: Callable[[Item], int], kind: Callable[[Item], Hashable], limit: int
) -> Iterator[list[Item]]:
    """Yield neighbouring items of a kind in groups of at most `limit` elements; a larger item is its own bucket."""
    bucket: list[Item] = []
    total = 0
    for item in items:
        size = elements(item)
        if bucket and (total + size > limit or kind(item) != kind(bucket[0])):
            yield bucket
            bucket, total = [], 0
        bucket.append(item)
        total += size
    if bucket:
        yield bucket
