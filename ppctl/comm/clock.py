"""One clock for all ranks: how far this host's clock is from rank 0's.

Knows hosts' boots and the monotonic clock. Must not know what is timed.
"""

from __future__ import annotations

import statistics
import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

_ROUNDS = 11


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
    rows = torch.empty(dist.get_world_size(), dtype=torch.float64)
    dist.all_gather(list(rows.view(-1, 1).unbind()), torch.tensor([value], dtype=torch.float64))
    return [float(row) for row in rows]
