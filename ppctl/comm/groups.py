"""Process groups from groups of ranks, and what every rank learns of all others over them: numbers, and their clock.

Knows how torch makes a group. Must not know what an axis or a number means.
"""

from __future__ import annotations

import inspect
import os
import statistics
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

_ON_FIRST_USE = "TORCH_GLOO_LAZY_INIT"
_ROUNDS = 11
"""Readings of which the median is the offset between two hosts' clocks."""


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
    group = dist.new_group(
        list(own[0]),
        backend=backend,
        timeout=limit_of(dist.group.WORLD),
        use_local_synchronization=True,
        **_in_this_order(own[0]),
    )
    assert isinstance(group, ProcessGroup)  # a member of the group gets the group, not the marker for strangers
    return group


def _in_this_order(ranks: tuple[int, ...]) -> dict[str, Any]:
    """What keeps `new_group` from sorting ranks: pipelines are listed in pp order, and an axis order may be unusual.

    torch has a switch from 2.13 on, and sorts before; ranks that are in order already need none. Raises ValueError.
    """
    if "sort_ranks" in inspect.signature(dist.new_group).parameters:
        return {"sort_ranks": False}
    if list(ranks) != sorted(ranks):
        raise ValueError(f"torch {torch.__version__} would sort the group {ranks}: 2.13 and later keep its order")
    return {}


@contextmanager
def connecting_on_first_use() -> Iterator[None]:
    """Two ranks of a gloo group that is made inside connect at their first message; the user's own setting stays.

    For groups with collectives alone: a send waits there until the other end receives, although it should return at
    once, and no time limit ends that wait if the other end has stopped. (Seen in torch 2.13; gloo#520.)
    """
    own = os.environ.get(_ON_FIRST_USE)
    os.environ.setdefault(_ON_FIRST_USE, "1")
    try:
        yield
    finally:
        if own is None:
            del os.environ[_ON_FIRST_USE]


def limit_of(group: ProcessGroup) -> timedelta:
    """How long the group waits for its other members before it gives up: the longest of its backends' limits."""
    options = [getattr(group._get_backend(device), "options", None) for device in group._device_types]
    limits = [each._timeout for each in options if each is not None]
    return max(limits, default=dist.default_pg_timeout)


def gather_rows(row: Sequence[float], rank: int, groups: Sequence[ProcessGroup]) -> Tensor:
    """The rows of all ranks in rank order, from this rank's own n numbers: [ranks, n] float64 on the CPU.

    A collective. `groups` are this rank's along the axes that make up the ranks, in one order for all: after a gather
    along an axis each of its ranks holds what all of them held. Global ranks must be below 2^53.

    A gather over a group goes round a ring: one hop for every other rank. Over pp and then over dp these are 15 + 127
    hops for 2,048 ranks, and every rank receives the same bytes as in a ring of the world with its 2,047 hops.
    """
    rows = torch.tensor([[rank, *row]], dtype=torch.float64)
    for group in groups:
        if group.size() > 1:
            gathered = torch.empty(group.size(), *rows.shape, dtype=torch.float64)
            dist.all_gather(list(gathered.unbind()), rows, group=group)
            rows = gathered.flatten(0, 1)
    return rows[rows[:, 0].argsort(), 1:]


def clock_offset() -> float:
    """Seconds to add to this process's perf_counter to get rank 0's. A collective over the world; once, at start-up.

    Processes of one booted host share the monotonic clock: their offset is exactly 0. Between hosts it is the median of
    several readings taken right after a barrier, good to about the time that a barrier takes.
    """
    boots = _gather(float(_boot()))
    readings = []
    if len(set(boots)) > 1:
        for _ in range(_ROUNDS):
            dist.barrier()
            times = _gather(time.perf_counter())
            readings.append(times[0] - times[dist.get_rank()])
    same = boots[0] == boots[dist.get_rank()]
    return 0.0 if same else statistics.median(readings)


def _boot() -> int:
    """A number that processes of the same booted machine agree on."""
    try:
        return zlib.crc32(Path("/proc/sys/kernel/random/boot_id").read_bytes())
    except OSError:
        return zlib.crc32(str(round(time.time() - time.monotonic())).encode())


def _gather(value: float) -> list[float]:
    assert dist.group.WORLD is not None  # or there would be no rank
    numbers: list[float] = gather_rows([value], dist.get_rank(), [dist.group.WORLD])[:, 0].tolist()
    return numbers
