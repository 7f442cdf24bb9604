"""The exchanges of ranks that divide weights: tokens gathered and summed, and small sums (`model/split.py`).

Each is started, and waited for later: on a GPU it runs on the group's own stream beside computation, and the host never
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppctl.parallel.exchange_counts import starting
from ppctl.parallel.replicate import start_sums
from ppctl.parallel.shard import all_gather, reduce_scatter


class TensorParallel:
    """The ranks of `group`, each with a part of every split weight, and with `sequence` its own tokens in between."""

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.sequence = sequence

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """Start gathering all tokens [b, s, ...] from x [b, s / size, ...]; returns the function that waits for them (x
        itself if every rank has all tokens)."""
        if not self.sequence:
            return lambda: x
        own, rows = x.contiguous(), x.new_empty(self.size, *x.shape)
        starting(self.group)
        work = all_gather(rows.view(-1), own.view(-1), group=self.group, async_op=True)

        def gathered(_: Tensor = own) -> Tensor:  # held until then, whatever the backend holds
            work.wait()
            return rows.transpose(0, 1).flatten(1, 2)  # a copy, unless there is one sample

        return gathered

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum over ranks of x [b, s, ...]. The function returned waits for it and gives this rank's tokens
        [b, s / size, ...] of it, or all without sequence parallelism; then a contiguous x is overwritten."""
        starting(self.group)
        if not self.sequence:
            total = rows = x.contiguous()
            work = dist.all_reduce(total, group=self.group, async_op=True)
        else:
            rows = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
            total = rows.new_empty(rows.shape[1:])
            work = reduce_scatter(total.view(-1), rows.view(-1), group=self.group, async_op=True)

        def summed(_: Tensor = rows) -> Tensor:
            work.wait()
            return total

        return summed

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the memory of x."""
        starting(self.group)
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over ranks, in the memory of x."""
        starting(self.group)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x


class SharedTokens:
    """The ranks that have equal shares of a microbatch's tokens; a sum goes along one of the groups after another."""

    def __init__(self, groups: Sequence[dist.ProcessGroup]) -> None:
        self.groups = tuple(groups)
        self.ranks = 1
        for group in self.groups:
            self.ranks *= group.size()

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the memory of x."""
        for group in self.groups:
            starting(group)
            dist.all_reduce(x, group=group)
        return x


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup) -> None:
    """Replace the partial gradients that every rank has of whole parameters by the sums over the ranks; once a step."""
    for work in start_sums(parameters, group):
        work.wait()


def gather_runs(own: Tensor, dim: int, size: int, group: dist.ProcessGroup) -> Tensor:
    """Gather the whole tensor, `size` long along `dim`, from the ranks' contiguous slices (of `geometry/rows.py`)."""
    step = -(-size // group.size())
    first = own.movedim(dim, 0)
    filled = first.new_zeros(step, *first.shape[1:])
    filled[: len(first)] = first
    rows = filled.new_empty(group.size() * filled.numel())
    all_gather(rows, filled.view(-1), group=group)
    return rows.view(-1, *first.shape[1:])[:size].movedim(0, dim).contiguous()
