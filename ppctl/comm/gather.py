"""Every rank's numbers on every rank, over the groups of the grid instead of the whole world.

Knows process groups. Must not know what the numbers mean, nor which axes there are.

A gather over a group goes round a ring: one hop for every other rank. Over pp and then over dp these are 15 + 127 hops
for 2,048 ranks, and every rank receives the same bytes as in a ring of the world with its 2,047 hops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def gather_rows(row: Sequence[float], rank: int, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """The rows of all ranks in rank order, from this rank's own n numbers: [ranks, n] float64 on the CPU.

    A collective. `groups` are this rank's along the axes that make up the ranks, in one order for all: after a gather
    along an axis each of its ranks holds what all of them held. Global ranks must be below 2^53.
    """
    rows = torch.tensor([[rank, *row]], dtype=torch.float64)
    for group in groups:
        if group.size() > 1:
            gathered = torch.empty(group.size(), *rows.shape, dtype=torch.float64)
            dist.all_gather(list(gathered.unbind()), rows, group=group)
            rows = gathered.flatten(0, 1)
    return rows[rows[:, 0].argsort(), 1:]
