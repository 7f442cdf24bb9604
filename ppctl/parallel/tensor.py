"""The exchanges of ranks that divide weights: tokens gathered and summed, and small sums (`model/split.py`).

Knows a process group and the dim of tokens. Must not know weights or blocks. Each exchange is started and waited for
later: on a GPU it runs on the group's own stream beside what is computed meanwhile, and the host never waits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

from ppctl.parallel.shard import all_gather, reduce_scatter


class TensorParallel:
    """The ranks of `group`, each with a part of every split weight; `sequence`: and with its own tokens in between."""

    def __init__(self, group: dist.ProcessGroup, *, sequence: bool) -> None:
        self.group = group
        self.rank, self.size = group.rank(), group.size()
        self.sequence = sequence

    def start_gather(self, x: Tensor) -> Callable[[], Tensor]:
        """All tokens [b, s, ...] of the own [b, s / size, ...]; x itself where every rank has all of them."""
        if not self.sequence:
            return lambda: x
        rows = x.new_empty(self.size, *x.shape)
        work = all_gather(rows.view(-1), x.contiguous().view(-1), group=self.group, async_op=True)

        def gathered() -> Tensor:
            work.wait()
            return rows.transpose(0, 1).flatten(1, 2)  # a copy, unless there is one sample

        return gathered

    def start_sum(self, x: Tensor) -> Callable[[], Tensor]:
        """The sum over ranks of x [b, s, ...]: of the own tokens [b, s / size, ...], or of all, in the memory of x."""
        if not self.sequence:
            x = x.contiguous()
            work = dist.all_reduce(x, group=self.group, async_op=True)
        else:
            rows = x.unflatten(1, (self.size, -1)).transpose(0, 1).contiguous()
            x = rows.new_empty(rows.shape[1:])
            work = reduce_scatter(x.view(-1), rows.view(-1), group=self.group, async_op=True)

        def summed() -> Tensor:
            work.wait()
            return x

        return summed

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over ranks, in the memory of x."""
        dist.all_reduce(x, group=self.group)
        return x

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over ranks, in the memory of x."""
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return x
