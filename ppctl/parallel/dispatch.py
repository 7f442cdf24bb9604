"""Expert parallelism: rows travel to the ranks that hold their experts, and their results travel back.

Deadlock-free because all ranks of the group run the same schedule on the same stages: each reaches its k-th exchange
after the same actions. Separate groups keep exchanges apart from reductions that run beside the pipeline. Without
nodes, counts are under way while rows are sorted.

For experts on several nodes a row goes to each node once, and comes back as one sum for each run. The ranks of an
`outer` group have the same place on every node, and each exchanges its own rows with the other nodes; which rank of a
node has an expert does not matter for these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.config.schema import ModelConfig
from ppctl.geometry.expert_reach import expert_runs
from ppctl.parallel.all_to_all import all_to_all, exchange, start_exchange
from ppctl.parallel.exchange_counts import starting
from ppctl.parallel.shard import all_gather
from ppctl.tensors.row_copies import RowCopies, copied, inverse_of, reorder, set_places, summed, sums

_Exchange = Callable[[Tensor, list[int], dist.ProcessGroup], Tensor]
_Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


class ExpertExchange:
    """Sends rows to their experts and the results back. Each rank of the ep group holds equally many consecutive
    experts, and an expert gets every row routed to it.

    Rows go straight to the ranks with their experts. If `groups` has the axis `ep-outer`, a row goes first to the rank
    in this rank's place on each node that holds one of its experts, and from there on within `ep-inner`. Results come
    back the same way, and are summed in the model's own order (`ExpertRuns`): both have the bits of one process. Counts
    of all rows are sent once, ahead. The ranks of the etp group divide every expert: between the exchanges each gathers
    the rows of all of them, and the results of its own rows are summed. A group may be missing.
    """

    def __init__(self, groups: Mapping[str, dist.ProcessGroup], model: ModelConfig) -> None:
        self.group, self.etp_group = groups.get("ep"), groups.get("etp")
        self.inner, self.outer = groups.get("ep-inner"), groups.get("ep-outer")
        self.model, self.runs = model, expert_runs(model)

    def __call__(self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor, experts: _Experts) -> Tensor:
        """The sums [t, h] over each row's experts, `chosen` [t, K] in ascending order with `weights` [t, K]. `counts`
        [E] (int64) is each expert's number of rows; `experts` takes rows by expert, their weights, and the counts."""
        way = self._straight if self.outer is None else self._by_node
        return way(rows, chosen, weights, counts, experts)

    def _straight(self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor, experts: _Experts) -> Tensor:
        sent = counts.view(1 if self.group is None else self.group.size(), -1)
        received = sent if self.group is None else torch.empty_like(sent)  # [sender, expert here]
        under_way = None if self.group is None else start_exchange(received, sent, self.group)
        copies, order = RowCopies.of(chosen, self.runs.size, self.runs.most)
        going = [copied(rows, copies), reorder(weights.reshape(-1, 1), order, copies.places)]
        if under_way is not None:
            under_way.wait()
        arriving = self._of_all(received[:, :, None])
        sends, receives, shared = self.sizes(sent.sum(1), received.sum(1), arriving.sum((1, 2, 3)))
        return summed(self._at_experts(going, experts, self.group, arriving, sends, receives, shared), copies)

    def _by_node(self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor, experts: _Experts) -> Tensor:
        """Send each row once to every node with some of its experts, distribute it there, and sum the returned rows."""
        assert self.group is not None and self.outer is not None  # set with nodes
        nodes, place = self.outer.size(), 0 if self.inner is None else self.inner.rank()
        own = len(counts) // nodes
        runs = runs_on_nodes(chosen, own, self.runs.size, nodes)
        # Rows of each expert of a node, rows that go there, and sums that come back.
        sent = torch.cat((counts.view(nodes, -1), runs.any(-1).sum(1)[:, None], runs.sum((1, 2))[:, None]), 1)
        every = sent.repeat_interleave(self.group.size() // nodes, 0)
        received = torch.empty_like(every)
        start_exchange(received, every, self.group).wait()
        received = received.view(nodes, -1, own + 2)  # [node, place of the sender, numbers]
        passing = received[:, place]  # rows that go through this rank
        onward = passing[:, :own].sum(0).view(received.shape[1], -1)  # [place, expert there]
        ours = received[:, :, place * onward.shape[1] : (place + 1) * onward.shape[1]]
        arriving = self._of_all(ours.permute(1, 2, 0))
        hops = sent[:, -2], passing[:, -2], passing[:, -1], sent[:, -1], onward.sum(1), ours.sum((0, 2))
        *hop, sends, receives, shared = self.sizes(*hops, arriving.sum((1, 2, 3)))
        copies, weighed = across_nodes(chosen, weights, runs, self.runs.size, sum(sends), self.outer, hop)
        going = [copied(rows, copies), weighed]
        return summed(self._at_experts(going, experts, self.inner, arriving, sends, receives, shared), copies)

    def _at_experts(
        self,
        rows: list[Tensor],
        experts: _Experts,
        group: dist.ProcessGroup | None,
        arriving: Tensor,
        *sizes: list[int],
    ) -> Tensor:
        """The results of rows (by expert) and their weights, in order of the rows, over the ranks of `group`.

        `arriving` [etp rank, sender, expert here, node] says how many rows come, in this order; `sizes` how many are
        sent to each rank, come from each, and are at each etp rank. At the experts, rows of one expert are in order of
        their etp rank, then of node and sender, then as sent.
        """
        sends, receives, shared = sizes
        going, weighed = rows
        rows.clear()  # no gradient needs sent rows, nor arrived rows before sorting
        if group is not None:
            going, weighed = all_to_all(group, sends, receives, going, weighed)
        if self.etp_group is not None:
            going, weighed = (_share(each, shared, self.etp_group, _gather_rows) for each in (going, weighed))
        etp, places, own, nodes = arriving.shape
        blocks = torch.arange(arriving.numel(), device=going.device).view(own, etp, nodes, places)
        order = (
            blocks.permute(1, 3, 0, 2)
            .flatten()
            .repeat_interleave(arriving.flatten(), output_size=sum(shared))
            .argsort(stable=True)
        )
        back = inverse_of(order)
        by_expert, weights = reorder(going, order, back), reorder(weighed, order, back)
        del going, weighed
        done = reorder(experts(by_expert, weights, arriving.sum((0, 1, 3))), back, order)
        if self.etp_group is not None:
            done = _share(done, shared, self.etp_group, _scatter_rows)
        return done if group is None else all_to_all(group, receives, sends, done)[0]

    def sizes(self, *numbers: Tensor) -> list[list[int]]:
        """Return `numbers` of rows on the host. Only here in a layer the host waits for the device, since buffers and
        messages need sizes."""
        every = iter(torch.cat(numbers).tolist())
        return [list(islice(every, len(each))) for each in numbers]

    def _of_all(self, arriving: Tensor) -> Tensor:
        """The numbers of rows that arrive at each rank with a part of the same experts, [etp rank, *arriving]."""
        if self.etp_group is None:
            return arriving[None]
        everyone = arriving.new_empty(self.etp_group.size(), *arriving.shape)
        starting(self.etp_group)
        all_gather(everyone.view(-1), arriving.contiguous().view(-1), group=self.etp_group)
        return everyone


def _share(rows: Tensor, shared: list[int], group: dist.ProcessGroup, there: _Exchange) -> Tensor:
    """The rows of all ranks of the group in their order (`_gather_rows`), or for this rank's own rows the sums over
    the ranks (`_scatter_rows`); gradients take the other way. `shared` says how many rows each rank has."""
    done: Tensor = _Share.apply(rows, shared, group, there)  # type: ignore[no-untyped-call]  # torch's own
    return done


class _Share(torch.autograd.Function):
    """One exchange of rows among ranks that divide experts, and its reverse for gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, shared: list[int], group: dist.ProcessGroup, there: _Exchange) -> Tensor:
        ctx.back, ctx.among = _scatter_rows if there is _gather_rows else _gather_rows, (shared, group)
        return there(rows, shared, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.back(gradients[0], *ctx.among), None, None, None


def _gather_rows(rows: Tensor, shared: list[int], group: dist.ProcessGroup) -> Tensor:
    """Gather rows by an all_to_all, because a gather needs equally many rows on every rank."""
    own = [len(rows)] * len(shared)
    return exchange(group, own, shared, rows.repeat(len(shared), 1))[0]


def _scatter_rows(rows: Tensor, shared: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sum this rank's own rows over the ranks, in the ranks' order and in the rows' dtype."""
    own = shared[group.rank()]
    (parts,) = exchange(group, shared, [own] * len(shared), rows)
    total, *others = parts.split(own) if own else [parts]
    for part in others:
        total.add_(part)
    return total


Hop = Sequence[list[int]]
"""(rows to each node, rows from each, sums to each, sums from each)."""


def runs_on_nodes(numbers: Tensor, experts: int, run: int, nodes: int) -> Tensor:
    """[nodes, t, runs of a node]: which runs hold some of each row's experts, `numbers` [t, K]; a node has `experts`
    experts."""
    every = torch.arange(nodes * experts // run, device=numbers.device)
    runs: Tensor = (numbers[..., None] // run == every).any(1)
    by_node: Tensor = runs.unflatten(1, (nodes, -1))
    return by_node.transpose(0, 1)


class NodeCopies(NamedTuple):
    """Copies at this rank's place of every node, sorted by expert; sums of each run of a node are made there."""

    there: Tensor
    """For each copy that is sent, by node, the number of its row."""
    rows: Tensor
    """[n] the number of each copy's arrived row."""
    places: Tensor
    """[n] the copies, a row's copies together."""
    starts: Tensor
    """Where the sum of each run of each arrived row starts among these."""
    back_places: Tensor
    """The returned sums, a row's sums together."""
    back_starts: Tensor
    """[t] where each row's sums start among these."""
    group: dist.ProcessGroup
    hop: Hop

    def down(self, rows: Tensor) -> Tensor:
        """Exchange this rank's rows [t, h]; returns the copies here of all nodes' rows."""
        (arrived,) = exchange(self.group, self.hop[0], self.hop[1], rows.index_select(0, self.there))
        return arrived.index_select(0, self.rows)

    def up(self, copies: Tensor) -> Tensor:
        """Sum the copies here, exchange the sums; returns the sums [t, h] of this rank's rows."""
        (back,) = exchange(self.group, self.hop[2], self.hop[3], sums(copies, self.places, self.starts))
        return sums(back, self.back_places, self.back_starts)


def across_nodes(
    numbers: Tensor, weights: Tensor, runs: Tensor, run: int, copies: int, group: dist.ProcessGroup, hop: Hop
) -> tuple[NodeCopies, Tensor]:
    """(the `copies` copies here, a weight [n, 1] for each) of rows with experts `numbers` [t, K] and `weights` [t, K],
    which are in `runs` of `run` experts. A row's experts and weights are sent ahead of it, so that this rank knows
    which copies to make.
    """
    (sends, receives, back_sends, back_receives), (tokens, topk) = hop, numbers.shape
    experts = runs.shape[2] * run
    sent = set_places(runs.any(-1), sum(sends))
    there = sent % tokens
    inside = numbers.index_select(0, there) - (sent // tokens * experts)[:, None]
    inside = torch.where((inside >= 0) & (inside < experts), inside, experts).to(torch.int32)
    chosen = inside.new_empty(sum(receives), topk)
    under_way = start_exchange(chosen, inside, group, sends, receives)
    (weighed,) = all_to_all(group, sends, receives, weights.index_select(0, there), small=True)
    under_way.wait()
    by_expert = chosen.flatten().argsort(stable=True)
    order = by_expert[:copies]  # then come experts of other nodes
    local, number = chosen < experts, chosen // run
    first = local & torch.cat((local[:, :1], number.diff(dim=1) != 0), 1)
    together = set_places(local, copies)
    starts = set_places(first.flatten().index_select(0, together), sum(back_sends))
    # Sums come back by node, then by row; and are added up by row, then by node and run.
    arriving = runs.flatten().cumsum(0).view(runs.shape).transpose(0, 1) - 1
    by_row = runs.transpose(0, 1)
    back_places = arriving.flatten().index_select(0, set_places(by_row, sum(back_receives)))
    each = by_row.sum((1, 2))
    places = inverse_of(by_expert).index_select(0, together)
    made = NodeCopies(there, order // topk, places, starts, back_places, each.cumsum(0) - each, group, hop)
    return made, weighed.flatten().index_select(0, order)[:, None]
