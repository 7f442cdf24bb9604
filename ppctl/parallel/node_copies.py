"""Copies of rows for experts on several nodes: a row goes to each node once, and comes back as one sum for each run.

The ranks of an `outer` group have the same place on every node, so that each sends and receives all that its own rows
have to do with other nodes; which rank of a node has an expert does not matter here. Knows how rows and sums are
ordered on their way. Must not know experts' results, nor what happens inside a node.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.parallel.all_to_all import all_to_all_together, exchange, start_exchange
from ppctl.tensors.row_copies import set_places, sums
from ppctl.tensors.row_order import inverse_of


class Reach(NamedTuple):
    """Which nodes and runs of experts the rows of this rank go to."""

    numbers: Tensor
    """[t, K] the experts of each row, ascending."""
    nodes: Tensor
    """[nodes, t] whether a node holds some of a row's experts."""
    runs: Tensor
    """[nodes, t, runs of a node] the same of its runs."""

    @classmethod
    def of(cls, numbers: Tensor, experts: int, run: int, nodes: int) -> Reach:
        """From the experts of each row, of which a node has `experts` and a run `run`."""
        every = torch.arange(nodes * experts // run, device=numbers.device)
        runs = (numbers[..., None] // run == every).any(1)
        runs = runs.unflatten(1, (nodes, -1)).transpose(0, 1)
        return cls(numbers, runs.any(-1), runs)

    def counts(self, each: Tensor) -> Tensor:
        """[nodes, experts of a node + 2]: the rows of each expert `each` [E], rows there, and sums that come back."""
        of_nodes = each.view(len(self.nodes), -1)
        return torch.cat((of_nodes, self.nodes.sum(1)[:, None], self.runs.sum((1, 2))[:, None]), 1)


class Hop(NamedTuple):
    """How many rows go to each node and come from it, and likewise of the sums on their way back."""

    sends: list[int]
    receives: list[int]
    back_sends: list[int]
    back_receives: list[int]


class NodeCopies(NamedTuple):
    """Copies at this rank's place of every node, sorted by expert; sums of each run of a node are made there."""

    there: Tensor
    """The row of each of those that are sent, by node."""
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
        arrived = exchange(rows.index_select(0, self.there), self.group, self.hop.sends, self.hop.receives)
        return arrived.index_select(0, self.rows)

    def up(self, copies: Tensor) -> Tensor:
        """The sums of this rank's rows [t, h], of the copies that are here."""
        own = sums(copies, self.places, self.starts)
        back = exchange(own, self.group, self.hop.back_sends, self.hop.back_receives)
        return sums(back, self.back_places, self.back_starts)


def across_nodes(
    reach: Reach, weights: Tensor, run: int, group: dist.ProcessGroup, hop: Hop, copies: int
) -> tuple[NodeCopies, Tensor]:
    """The copies here, `copies` of them, and a weight [n, 1] for each, of each row's own `weights` [t, K].

    A row's experts travel ahead of it with their weights, so that this rank knows which copies it is to make.
    """
    tokens = len(reach.numbers)
    experts, topk = reach.runs.shape[2] * run, reach.numbers.shape[1]
    places = set_places(reach.nodes, sum(hop.sends))
    there = places % tokens
    inside = reach.numbers.index_select(0, there) - (places // tokens * experts)[:, None]
    inside = torch.where((inside >= 0) & (inside < experts), inside, experts).to(torch.int32)
    chosen = inside.new_empty(sum(hop.receives), topk)
    under_way = start_exchange(chosen, inside, group, hop.sends, hop.receives)
    (weighed,) = all_to_all_together(group, hop.sends, hop.receives, weights.index_select(0, there), small=True)
    under_way.wait()
    by_expert = chosen.flatten().argsort(stable=True)
    order = by_expert[:copies]
    here, number = chosen < experts, chosen // run
    first = here & torch.cat((here[:, :1], number.diff(dim=1) != 0), 1)
    together = set_places(here, copies)
    starts = set_places(first.flatten().index_select(0, together), sum(hop.back_sends))
    # Sums come back by node, then by row; and are added up by row, then by node and run.
    arriving = reach.runs.flatten().cumsum(0).view(reach.runs.shape) - 1
    by_row = reach.runs.transpose(0, 1)
    back_places = arriving.transpose(0, 1).flatten().index_select(0, set_places(by_row, sum(hop.back_receives)))
    each = by_row.sum((1, 2))
    made = NodeCopies(
        there,
        order // topk,
        inverse_of(by_expert).index_select(0, together),
        starts,
        back_places,
        each.cumsum(0) - each,
        group,
        hop,
    )
    return made, weighed.flatten().index_select(0, order)[:, None]
