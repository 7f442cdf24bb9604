"""Process groups from groups of ranks, as RankGrid lists them.

Knows how torch makes a group. Must not know what an axis means: it is given rank tuples.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


def make_group(
    groups: Iterable[tuple[int, ...]], *, backend: str | None = None, timeout: timedelta | None = None
) -> ProcessGroup:
    """Make the process group of this rank among `groups` (disjoint tuples of global ranks, in group order).

    Only its members take part in making a group, so every rank calls this for the same axes in the same order. Group
    rank i is the i-th of the tuple. Raises ValueError where no group, or more than one, holds this rank.
    """
    rank = dist.get_rank()
    own = [group for group in groups if rank in group]
    if len(own) != 1:
        raise ValueError(f"rank {rank} is in {len(own)} of the groups, and must be in exactly one")
    # Groups of pipelines are listed in pp order, which a sort by rank would lose under an unusual axis order.
    group = dist.new_group(
        list(own[0]), backend=backend, timeout=timeout, use_local_synchronization=True, sort_ranks=False
    )
    assert isinstance(group, ProcessGroup)  # a member of the group gets the group, not the marker for strangers
    return group
