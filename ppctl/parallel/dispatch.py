"""Expert parallelism: rows travel to the ranks that hold their experts, and their results travel back.

Knows a process group and rows sorted by expert. Must not know routers, experts or the pipeline. Deadlock-free because
all ranks of the group run the same schedule on the same stages: each reaches its k-th exchange after the same actions.
A group of its own keeps exchanges apart from reductions that run beside the pipeline. Counts are under way while the
rows are sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.parallel.all_to_all import all_to_all, exchange, start_exchange
from ppctl.parallel.exchange_counts import starting
from ppctl.parallel.shard import all_gather
from ppctl.tensors.row_order import inverse_of, reorder

_Exchange = Callable[[Tensor, list[int], dist.ProcessGroup], Tensor]


class ExpertExchange:
    """Experts in equal runs of neighbours over the ranks of `group`; each rank gets as many rows as there are for it.

    Two exchanges a forward (and two a backward), and one of the counts before them, which are needed on the host. The
    ranks of `etp_group` divide every expert: between the exchanges each gets the rows of all of them, and the results
    of its own are summed. Either group may be missing.
    """

    def __init__(self, group: dist.ProcessGroup | None, etp_group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.etp_group = etp_group

    def __call__(
        self, make_rows: Callable[[], Tensor], counts: Tensor, experts: Callable[[Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Apply `experts(rows, counts of its own experts)` where they are; rows [n, h] and `counts` [E] by expert.

        The result is in the order of the rows. At the experts, rows of one are in order of their sender, then as sent.
        """
        size = 1 if self.group is None else self.group.size()
        sent = counts.view(size, -1)
        received = torch.empty_like(sent)  # [sender, expert here]
        under_way = None if self.group is None else start_exchange(received, sent, self.group)
        rows = make_rows()
        if under_way is None:
            received = sent
        else:
            under_way.wait()
        # [etp rank, sender, expert here]: what this rank's experts get, with those that have other parts of them.
        all_received = received[None] if self.etp_group is None else _gathered(received, self.etp_group)
        sends, receives, shared = self.sizes(sent, received, all_received)
        arrived = rows if self.group is None else all_to_all(rows, self.group, sends, receives)
        del rows  # no gradient needs what was sent, nor what came before it is sorted
        if self.etp_group is not None:
            arrived = _gathered_rows(arrived, shared, self.etp_group)
        here = torch.arange(received.shape[1], device=arrived.device).repeat(len(all_received) * size)
        expert = here.repeat_interleave(all_received.flatten(), output_size=sum(shared))
        order = expert.argsort(stable=True)
        back = inverse_of(order)
        by_expert = reorder(arrived, order, back)
        del arrived
        done = reorder(experts(by_expert, all_received.sum((0, 1))), back, order)
        if self.etp_group is not None:
            done = _summed_rows(done, shared, self.etp_group)
        return done if self.group is None else all_to_all(done, self.group, receives, sends)

    def sizes(self, sent: Tensor, received: Tensor, all_received: Tensor) -> tuple[list[int], list[int], list[int]]:
        """How many rows go to each rank and come from it, of counts [rank, expert], and arrive at each etp rank.

        The one place of a layer where the host waits for the device: buffers and messages need sizes.
        """
        numbers = torch.cat((sent.sum(1), received.sum(1), all_received.sum((1, 2)))).tolist()
        ranks = len(sent)
        return numbers[:ranks], numbers[ranks : 2 * ranks], numbers[2 * ranks :]


def _gathered_rows(rows: Tensor, shared: list[int], group: dist.ProcessGroup) -> Tensor:
    """The rows of all ranks of the group, in their order; `shared` says how many each has. Gradients are summed."""
    gathered: Tensor = _Share.apply(rows, shared, group, _gather_rows, _scatter_rows)  # type: ignore[no-untyped-call]  # torch's own
    return gathered


def _summed_rows(rows: Tensor, shared: list[int], group: dist.ProcessGroup) -> Tensor:
    """The sum over the ranks for this rank's own rows; gradients are gathered."""
    own: Tensor = _Share.apply(rows, shared, group, _scatter_rows, _gather_rows)  # type: ignore[no-untyped-call]  # torch's own
    return own


class _Share(torch.autograd.Function):
    """One exchange of rows among ranks that divide experts, and its reverse for gradients."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, shared: list[int], group: dist.ProcessGroup, there: _Exchange, back: _Exchange
    ) -> Tensor:
        ctx.back, ctx.shared, ctx.group = back, shared, group
        return there(rows, shared, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return ctx.back(gradients[0], ctx.shared, ctx.group), None, None, None, None


def _gather_rows(rows: Tensor, shared: list[int], group: dist.ProcessGroup) -> Tensor:
    """Gathers rows with an all_to_all, because a gather needs equally many rows on every rank."""
    own = [len(rows)] * len(shared)
    return exchange(rows.repeat(len(shared), 1), group, own, shared)


def _scatter_rows(rows: Tensor, shared: list[int], group: dist.ProcessGroup) -> Tensor:
    """Summed in order of the ranks, in the dtype of the rows."""
    own = shared[group.rank()]
    parts = exchange(rows, group, shared, [own] * len(shared))
    total, *others = parts.split(own) if own else [parts]
    for part in others:
        total.add_(part)
    return total


def _gathered(counts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The counts of all ranks, [rank, *counts]."""
    everyone = counts.new_empty(group.size(), *counts.shape)
    starting(group)
    all_gather(everyone.view(-1), counts.contiguous().view(-1), group=group)
    return everyone
