"""Process groups from groups of ranks, as RankGrid lists them.

Knows how torch makes a group. Must not know what an axis means: it is given rank tuples.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup


def make_group(groups: Iterable[tuple[int, ...]], *, backend: str | None = None) -> ProcessGroup:
    """Make the process group of this rank among `groups` (disjoint tuples of global ranks, in group order).

    Group rank i is the i-th of the tuple. The group obeys the world's limit; torch's own defaults (30 minutes, 10 for
    NCCL) know nothing of the limits of a run. Raises ValueError where no group, or more than one, holds this rank.

    Only the members take part in making a group, and torch then names it after its ranks and the number of groups that
    the process has made. So its members must have made the same number of groups before, or they look for each other
    under different names: what neighbours need in pairs, as channels, is no group (`ppctl.comm.connections`).
    """
    rank = dist.get_rank()
    own = [group for group in groups if rank in group]
    if len(own) != 1:
        raise ValueError(f"rank {rank} is in {len(own)} of the groups, and must be in exactly one")
    assert dist.group.WORLD is not None  # or there would be no rank
    # Groups of pipelines are listed in pp order, which a sort by rank would lose under an unusual axis order.
    group = dist.new_group(
        list(own[0]),
        backend=backend,
        timeout=limit_of(dist.group.WORLD),
        use_local_synchronization=True,
        sort_ranks=False,
    )
    assert isinstance(group, ProcessGroup)  # a member of the group gets the group, not the marker for strangers
    return group


def limit_of(group: ProcessGroup) -> timedelta:
    """How long the group waits for its other members before it gives up: the longest of its backends' limits."""
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [each._timeout for each in options if each is not None]
    return max(limits, default=dist.default_pg_timeout)
