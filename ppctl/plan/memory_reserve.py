"""What a GPU holds that no tensor of a run is in: CUDA's context and the communicators' buffers.

Knows sizes of groups, and what others have measured. Must not know peaks, nor the device's size. torch's allocator sees
none of it, so a plan's peak has to stay below the device's memory by this much. None of it was measured with ppctl yet.
"""

from __future__ import annotations

from ppctl.config.quantities import memory_bytes
from ppctl.config.schema import LaunchConfig
from ppctl.topology import ParallelSizes

RESERVE = "launch.memory_reserve"
AUTO = "auto"
_MIB = 2**20

CONTEXT = 1024 * _MIB
"""CUDA's context with torch's kernels, about 0.5 GiB; and what an H100 of 80 GB shows less than 80 GiB: 79.65 GiB, or
81,559 MiB in nvidia-smi (thundergolfer.com/blog/nvidia-gpu-memory-capacity)."""
PAIR, RING = 544 * _MIB, 688 * _MIB
"""A communicator of two ranks, and of more, after an all-reduce: measured on four A100 with NVLink (NVIDIA/nccl#964).
A ring has two neighbours however many ranks it goes through, so that it does not grow (#986)."""
CONNECTION = 12 * _MIB
"""One NCCL channel to one peer: buffers of 10 and of 2 MiB (NVIDIA/nccl#1685)."""
PEER_CHANNELS, PEERS = 32, 7
"""Channels to each peer in an all-to-all on eight H100, and its peers (the same issue: 3.28 GB in all)."""
NETWORK = 512 * _MIB
"""The buffer that all peers on other machines share (NVIDIA/nccl#2363)."""
MESSAGE_ENDS = 8
"""Ends of a pipeline's channels on one rank: activations and gradients, in and out, at two neighbours."""
MESSAGE_CHANNELS = 4
"""NCCL channels of each: `MAX_CTAS` of `ppctl.comm.connections`."""


def reserve_bytes(launch: LaunchConfig, sizes: ParallelSizes) -> int:
    """Bytes of `launch.memory_reserve`; `auto` is 0 on the CPU. Raises ValueError for what is no amount of memory."""
    if launch.memory_reserve != AUTO:
        return memory_bytes(launch.memory_reserve)
    if launch.device == "cpu":
        return 0
    # Ranks that share a GPU send through host memory.
    return CONTEXT if launch.share_gpu else CONTEXT + communicators(sizes)


def communicators(sizes: ParallelSizes) -> int:
    """Bytes that NCCL takes on one rank for the groups of these sizes and for a pipeline's channels."""
    experts = [sizes.ep, sizes.edp] if sizes.ep > 1 else []
    total = sum(map(_group, (sizes.pp, sizes.tp, sizes.cp * sizes.dp, *experts)))
    if sizes.pp > 1:
        total += MESSAGE_ENDS * MESSAGE_CHANNELS * CONNECTION
    if sizes.ep > 1:
        total += min(sizes.ep - 1, PEERS) * PEER_CHANNELS * CONNECTION
        total += NETWORK if sizes.ep - 1 > PEERS else 0
    return total


def _group(size: int) -> int:
    return 0 if size == 1 else PAIR if size == 2 else RING
