"""Expert parallelism: rows travel to the ranks that hold their experts, and their results travel back.

Knows a process group and rows sorted by expert. Must not know routers, experts or the pipeline. Deadlock-free because
all ranks of the group run the same schedule on the same stages: each reaches its k-th exchange after the same actions.
A group of its own keeps exchanges apart from reductions that run beside the pipeline. While rows are under way the
other half of a pair may compute (`turns`); counts are under way while the rows are sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.row_order import reorder
from ppctl.turns import hand_over


class ExpertExchange:
    """Experts in equal runs of neighbours over the ranks of `group`; each rank gets as many rows as there are for it.

    Two exchanges a forward (and two a backward), and one of the counts before them, which are needed on the host.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(
        self, make_rows: Callable[[], Tensor], counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Apply `experts(rows, counts of its own experts)` where they are; rows [n, h] and `counts` [E] by expert.

        The result is in the order of the rows. At the experts, rows of one are in order of their sender, then as sent.
        """
        size = self.group.size()
        sent = counts.view(size, -1)
        received = torch.empty_like(sent)  # [sender, expert here]
        under_way = _start(received, sent, self.group)
        rows = make_rows()
        under_way.wait()
        sends, receives = self.sizes(sent, received)
        arrived: Tensor = _Exchange.apply(rows, receives, sends, self.group)  # type: ignore[no-untyped-call]
        del rows  # no gradient needs what was sent, nor what came before it is sorted
        here = torch.arange(received.shape[1], device=arrived.device).repeat(size)
        expert = here.repeat_interleave(received.flatten(), output_size=sum(receives))
        order = expert.argsort(stable=True)
        back = order.argsort()
        by_expert = reorder(arrived, order, back)
        del arrived
        done = reorder(experts(by_expert, received.sum(0)), back, order)
        results: Tensor = _Exchange.apply(done, sends, receives, self.group)  # type: ignore[no-untyped-call]
        return results

    def sizes(self, sent: Tensor, received: Tensor) -> tuple[list[int], list[int]]:
        """How many rows go to each rank and come from it, of counts [rank, expert].

        The one place of a layer where the host waits for the device: buffers and messages need sizes.
        """
        sends, receives = torch.stack((sent.sum(1), received.sum(1))).tolist()
        return sends, receives


class _Exchange(torch.autograd.Function):
    """`all_to_all_single` of rows; gradients take the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.receives, ctx.sends, ctx.group = receives, sends, group
        return _exchange(rows, receives, sends, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradients[0], ctx.sends, ctx.receives, ctx.group), None, None, None


def _exchange(rows: Tensor, receives: list[int], sends: list[int], group: dist.ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(receives), *rows.shape[1:])
    under_way = _start(arrived, rows.contiguous(), group, receives, sends)
    hand_over()
    under_way.wait()
    return arrived


def _start(
    received: Tensor,
    sent: Tensor,
    group: dist.ProcessGroup,
    receives: list[int] | None = None,
    sends: list[int] | None = None,
) -> dist.Work:
    work: dist.Work = dist.all_to_all_single(received, sent, receives, sends, group=group, async_op=True)
    return work
