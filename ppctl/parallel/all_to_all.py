"""Exchanges in which every rank of a group sends rows to every rank, and gradients go back the same way.

Every rank of a group makes the same exchanges in the same order. On CUDA, NCCL runs them on its stream of the group:
the current stream waits, not the host, and tensors are held until then. While rows are under way the other half of a
pair may compute (`turns`).
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


def all_to_all(
    group: dist.ProcessGroup, sends: Rows, receives: Rows, *tensors: Tensor, small: bool = False
) -> tuple[Tensor, ...]:
    """The rows that all ranks send to this one, in the order of ranks; rows of each tensor [n, ...] are sorted by
    receiver. All tensors have equally many rows and are under way together. During a `small` exchange the other half of
    a pair does not compute."""
    arrived: tuple[Tensor, ...] = _AllToAll.apply(group, sends, receives, small, *tensors)  # type: ignore[no-untyped-call]  # torch's own
    return arrived


def start_exchange(
    arrived: Tensor, rows: Tensor, group: dist.ProcessGroup, sends: Rows = None, receives: Rows = None
) -> dist.Work:
    """Start an exchange that fills `arrived` from all ranks' `rows`; returns the work. Both tensors are contiguous."""
    starting(group)
    work: dist.Work = dist.all_to_all_single(arrived, rows, receives, sends, group=group, async_op=True)
    return work


def exchange(
    group: dist.ProcessGroup, sends: Rows, receives: Rows, *tensors: Tensor, small: bool = False
) -> tuple[Tensor, ...]:
    """`all_to_all` without gradients."""
    sent = [each.contiguous() for each in tensors]
    count = len(sent[0]) if receives is None else sum(receives)
    arrived = tuple(each.new_empty(count, *each.shape[1:]) for each in sent)
    under_way = [start_exchange(*both, group, sends, receives) for both in zip(arrived, sent, strict=True)]
    if not small:
        hand_over()
    for each in under_way:
        each.wait()
    return arrived


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, group: dist.ProcessGroup, sends: Rows, receives: Rows, small: bool, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.sends, ctx.receives, ctx.small = group, sends, receives, small
        return exchange(group, sends, receives, *tensors, small=small)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        back = exchange(ctx.group, ctx.receives, ctx.sends, *gradients, small=ctx.small)
        return None, None, None, None, *back
