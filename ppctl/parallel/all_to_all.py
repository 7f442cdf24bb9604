"""Exchanges in which every rank of a group sends rows to every rank, and gradients that take the same way back.

Knows a process group and how many rows go where. Must not know what rows mean. Every rank of a group makes the same
exchanges in the same order. On CUDA, NCCL runs them on its stream of the group: the wait is the current stream's, not
the host's, and what is sent or received is held until then. While rows are under way the other half of a pair may
compute (`turns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.comm.turns import hand_over
from ppctl.parallel.exchange_counts import starting

Rows = Sequence[int] | None
"""How many rows go to each rank of a group, or come from it; None: equally many."""


def all_to_all(rows: Tensor, group: dist.ProcessGroup, sends: Rows = None, receives: Rows = None) -> Tensor:
    """The rows that all ranks send to this one, in their order; `rows` [n, ...] are sorted by their receivers."""
    arrived: Tensor = _AllToAll.apply(rows, group, sends, receives)  # type: ignore[no-untyped-call]  # torch's own
    return arrived


def exchange(rows: Tensor, group: dist.ProcessGroup, sends: Rows = None, receives: Rows = None) -> Tensor:
    """`all_to_all` without gradients."""
    rows = rows.contiguous()
    arrived = torch.empty_like(rows) if receives is None else rows.new_empty(sum(receives), *rows.shape[1:])
    under_way = start_exchange(arrived, rows, group, sends, receives)
    hand_over()
    under_way.wait()
    return arrived


def start_exchange(
    arrived: Tensor, rows: Tensor, group: dist.ProcessGroup, sends: Rows = None, receives: Rows = None
) -> dist.Work:
    """Start to fill `arrived`; both tensors are contiguous."""
    starting(group)
    work: dist.Work = dist.all_to_all_single(arrived, rows, receives, sends, group=group, async_op=True)
    return work


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, sends: Rows, receives: Rows) -> Tensor:
        ctx.group, ctx.sends, ctx.receives = group, sends, receives
        return exchange(rows, group, sends, receives)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return exchange(gradients[0], ctx.group, ctx.receives, ctx.sends), None, None, None
