"""Copies of rows for experts on several nodes: a row goes to each node once, and comes back as one sum for each run.

The ranks of an `outer` group have the same place on every node, so that each sends and receives all that its own rows
have to do with other nodes; which rank of a node has an expert does not matter here. Knows how rows and sums are
ordered on their way. Must not know experts' results, nor what happens inside a node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.parallel.all_to_all import all_to_all_together, exchange, start_exchange
from ppctl.tensors.row_copies import set_places, sums
from ppctl.tensors.row_order import inverse_of

Hop = Sequence[list[int]]
"""How many rows go to each node, and come from it; how many sums go back, and come back."""


def runs_on_nodes(numbers: Tensor, experts: int, run: int, nodes: int) -> Tensor:
    """[nodes, t, runs of a node] which runs hold some of each row's experts, `numbers` [t, K]; a node has `experts`."""
    every = torch.arange(nodes * experts // run, device=numbers.device)
    runs: Tensor = (numbers[..., None] // run == every).any(1)
    by_node: Tensor = runs.unflatten(1, (nodes, -1))
    return by_node.transpose(0, 1)


class NodeCopies(NamedTuple):
    """Copies at this rank's place of every node, sorted by expert; sums of each run of a node are made there."""

    there: Tensor
    """For each copy that is sent, by node, the number of its row."""
    rows: Tensor
    """[n] the row that arrived, for each copy."""
    places: Tensor
    """[n] the copies, of one row together."""
    starts: Tensor
    """Where the sum of each run of each row that arrived starts among these."""
    back_places: Tensor
    """The sums that come back, of one row together."""
    back_starts: Tensor
    """[t] where a row's own start among these."""
    group: dist.ProcessGroup
    hop: Hop

    def down(self, rows: Tensor) -> Tensor:
        """The copies here of what all nodes sent, of this rank's rows [t, h]."""
        arrived = exchange(rows.index_select(0, self.there), self.group, *self.hop[:2])
        return arrived.index_select(0, self.rows)

    def up(self, copies: Tensor) -> Tensor:
        """The sums of this rank's rows [t, h], of the copies that are here."""
        back = exchange(sums(copies, self.places, self.starts), self.group, *self.hop[2:])
        return sums(back, self.back_places, self.back_starts)


def across_nodes(
    numbers: Tensor, weights: Tensor, runs: Tensor, run: int, copies: int, group: dist.ProcessGroup, hop: Hop
) -> tuple[NodeCopies, Tensor]:
    """The copies here, `copies` of them, and a weight [n, 1] for each: of rows with experts `numbers` [t, K] and
    `weights` [t, K], which are in `runs` of `run` experts.

    A row's experts travel ahead of it with their weights, so that this rank knows which copies it is to make.
    """
    (sends, receives, back_sends, back_receives), (tokens, topk) = hop, numbers.shape
    experts = runs.shape[2] * run
    sent = set_places(runs.any(-1), sum(sends))
    there = sent % tokens
    inside = numbers.index_select(0, there) - (sent // tokens * experts)[:, None]
    inside = torch.where((inside >= 0) & (inside < experts), inside, experts).to(torch.int32)
    chosen = inside.new_empty(sum(receives), topk)
    under_way = start_exchange(chosen, inside, group, sends, receives)
    (weighed,) = all_to_all_together(group, sends, receives, weights.index_select(0, there), small=True)
    under_way.wait()
    by_expert = chosen.flatten().argsort(stable=True)
    order = by_expert[:copies]  # after these are experts of other nodes
    here, number = chosen < experts, chosen // run
    first = here & torch.cat((here[:, :1], number.diff(dim=1) != 0), 1)
    together = set_places(here, copies)
    starts = set_places(first.flatten().index_select(0, together), sum(back_sends))
    # Sums come back by node, then by row; and are added up by row, then by node and run.
    arriving = runs.flatten().cumsum(0).view(runs.shape).transpose(0, 1) - 1
    by_row = runs.transpose(0, 1)
    back_places = arriving.flatten().index_select(0, set_places(by_row, sum(back_receives)))
    each = by_row.sum((1, 2))
    places = inverse_of(by_expert).index_select(0, together)
    made = NodeCopies(there, order // topk, places, starts, back_places, each.cumsum(0) - each, group, hop)
    return made, weighed.flatten().index_select(0, order)[:, None]
