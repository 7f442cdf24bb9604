"""Memory of a GPU that no tensor of a run is in: CUDA's context and the communicators' buffers.

Knows which groups a run has, and what others have measured of one. Must not know peaks, nor the device's size. torch's
allocator sees none of it, so a plan's peak has to stay below the device's memory by this much. None of it was measured
with ppctl yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from ppctl.config.quantities import memory_bytes
from ppctl.config.schema import RunConfig
from ppctl.topology import ParallelSizes, axes_with_groups

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
"""Channels to each peer in an all-to-all on eight H100, and its peers (the same issue: 3.28 GB in all). A message round
a ring is taken to need as many to a neighbour."""
NETWORK = 512 * _MIB
"""The buffer that all peers on other machines share (NVIDIA/nccl#2363)."""
MESSAGE_ENDS = 8
"""Ends of a pipeline's channels on one rank: activations and gradients, in and out, at two neighbours."""
MESSAGE_CHANNELS = 4
"""NCCL channels of each: `MAX_CTAS` of `ppctl.comm.connections`."""


def reserve_bytes(config: RunConfig, sizes: ParallelSizes) -> int:
    """Bytes of `launch.memory_reserve`; `auto` is 0 on the CPU. Raises ValueError for what is no amount of memory."""
    launch = config.launch
    if launch.memory_reserve != AUTO:
        return memory_bytes(launch.memory_reserve)
    if launch.device == "cpu":
        return 0
    # Ranks that share a GPU send through host memory.
    return CONTEXT if launch.share_gpu else CONTEXT + communicators(config, sizes)


def communicators(config: RunConfig, sizes: ParallelSizes) -> int:
    """Bytes that NCCL takes on one rank for its groups, all of which are touched in the warm-up, and for messages."""
    total = sum(map(_group, _group_sizes(config, sizes))) + sum(map(_connections, _peers(config, sizes)))
    return total + (MESSAGE_ENDS * MESSAGE_CHANNELS * CONNECTION if sizes.pp > 1 else 0)


def _group_sizes(config: RunConfig, sizes: ParallelSizes) -> Iterator[int]:
    model = config.model
    for axes in axes_with_groups(sizes, experts=bool(model.num_moe_experts)):
        yield prod(getattr(sizes, axis) for axis in axes.split("-"))
    yield from config.parallel.hierarchical_context_parallel_sizes or ()
    # Of the token embedding: the input, a tied output, and the copies of all MTP modules.
    yield min(sizes.pp, 1 + model.share_embeddings_and_output_weights + bool(model.mtp_num_layers))


def _peers(config: RunConfig, sizes: ParallelSizes) -> Iterator[int]:
    """Ranks with which a rank exchanges messages in each of its groups, beside collectives that go round a ring."""
    if config.model.num_moe_experts:
        yield sizes.ep - 1
        yield sizes.etp - 1
    named = config.model.cp_comm_type
    kinds = {named} if isinstance(named, str) else set(named)
    inner, outer = config.parallel.hierarchical_context_parallel_sizes or (1, 1)
    yield sizes.cp - 1 if "a2a" in kinds else min(sizes.cp - 1, 2) if "p2p" in kinds else 0
    yield inner - 1
    yield min(outer - 1, 2)


def _group(size: int) -> int:
    return 0 if size == 1 else PAIR if size == 2 else RING


def _connections(peers: int) -> int:
    return min(peers, PEERS) * PEER_CHANNELS * CONNECTION + (NETWORK if peers > PEERS else 0)
