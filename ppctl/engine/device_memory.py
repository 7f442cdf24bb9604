"""What torch's allocator holds of a GPU: before the first message all that a step needs; and its figures.

Knows torch's caching allocator. Must not know what the memory is for.

Where its cache does not hold an allocation, the allocator asks the driver. If that has nothing left, it frees cached
blocks, and cudaFree waits until the whole device is idle. A posted receive is a kernel that runs until its message
comes: two ranks that free memory in one step wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

FRAGMENTS = 0.05
"""What the allocator's fragments may take beside a peak; a plan that leaves less free is called tight."""
_SMALL = 2**19
"""Bytes of a block that torch keeps apart from larger ones (up to 1 MiB)."""
_ROUNDING = 2**21
"""Bytes of which large blocks are multiples."""


def reserve(device: torch.device, peak: int, in_flight: int, varying: int = 0) -> int:
    """Let the allocator's cache hold `peak` bytes, with those in use; returns how many of them the device lacks.

    Called behind a pass of one microbatch, whose small blocks are needed `in_flight` times. Half of what is left at
    most is taken for fragments and for up to `varying` bytes that depend on the data.
    """
    stats = _stats(device)
    small = in_flight * _unused(stats, "small_pool")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    missing = max(0, peak - torch.cuda.memory_allocated(device))
    more = min(int(FRAGMENTS * peak) + varying, max(0, free - missing) // 2)
    most = free - free // 20  # the driver and NCCL take some themselves
    sizes = [*_divisible(min(missing + more, most), stats), *[_SMALL] * (small // _SMALL)]
    try:
        kept = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except torch.OutOfMemoryError:  # another process was faster
        return missing
    del kept  # the cache has them now
    return max(0, missing - free)


def _divisible(size: int, stats: Mapping[str, Any]) -> list[int]:
    """The sizes of blocks of `size` bytes together that requests of any size may be served from.

    Where the user's `max_split_size_mb` forbids to divide larger blocks, one of them would be lost to all requests but
    those that are as large.
    """
    most = stats.get("max_split_size", -1) - _ROUNDING
    return [size] if most <= 0 else [*[most] * (size // most), size % most]


class AllocatorFigures(NamedTuple):
    """How the allocator of a process gets on; nothing on a CPU, where none has a cache."""

    retries: int = 0
    """How often it has freed memory and waited for the device, ever."""
    driver_allocations: int = 0
    """How often it has asked the driver for memory, ever."""
    unused: int = 0
    """Bytes that it holds of the device and no tensor uses."""

    @classmethod
    def of(cls, device: torch.device) -> AllocatorFigures:
        """Those of now."""
        if device.type != "cuda":
            return cls()
        stats = _stats(device)
        return cls(stats.get("num_alloc_retries", 0), stats.get("num_device_alloc", 0), _unused(stats, "all"))


def _stats(device: torch.device) -> dict[str, Any]:
    return torch.cuda.memory_stats_as_nested_dict(device)


def _unused(stats: dict[str, Any], pool: str) -> int:
    reserved, allocated = (
        stats.get(what, {}).get(pool, {}).get("current", 0) for what in ("reserved_bytes", "allocated_bytes")
    )
    return int(reserved - allocated)
