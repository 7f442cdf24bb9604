"""The device of one machine's ranks, the backend of messages between them, and the number of hardware queues."""

from __future__ import annotations

import sys
from collections.abc import Mapping

QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
MOST_QUEUES = "32"
"""A rank has a stream for its kernels, one for each channel and one for each group. Two streams that share a hardware
queue may wait for each other; CUDA's default is 8 queues, the maximum 32."""

SEVERAL_RANKS = "NCCL_MULTI_RANK_GPU_ENABLE"
_SEVERAL_RANKS_SINCE = (2, 30, 7)


def why_one_queue_blocks(pp: int, queues: str | None) -> str | None:
    """The problem with a value of QUEUES for a pipeline of `pp` ranks; None if there is none."""
    if pp == 1 or queues != "1":
        return None
    return (
        f"{QUEUES}=1 puts all work of a GPU into one queue: a receive that is posted ahead of need would block the "
        "compute and the sends behind it, and the ranks would wait for each other for ever"
    )


def machines(nodes: int | None, per_node: int | None, world: int) -> tuple[int, int]:
    """(machines, ranks on each) for `world` ranks. If one number is None, it follows; if both are, on one machine."""
    if nodes is None:
        nodes = 1 if per_node is None else -(-world // per_node)
    return nodes, -(-world // nodes) if per_node is None else per_node


def gpus_needed(ranks: int, *, share: bool) -> int:
    """How many GPUs a machine must have for its ranks, which may `share` one."""
    return 1 if share else ranks


def device_type(asked: str, gpus: int, ranks: int, *, share: bool) -> str:
    """`cuda` or `cpu`, for all `ranks` of a machine with `gpus`; `asked` is one of these, or `any`. `any` is cuda if
    there are enough GPUs. All ranks of a machine get the same device: if each looked only for its own GPU, some would
    wait in NCCL for others that use gloo."""
    if asked != "any":
        return asked
    return "cuda" if gpus >= gpus_needed(ranks, share=share) else "cpu"


def device_index(local_rank: int, gpus: int, *, share: bool) -> int:
    """The number of a rank's GPU; ranks that share take them in turn."""
    return local_rank % max(gpus, 1) if share else local_rank


def nccl_shares_gpus(version: tuple[int, ...] | None, environ: Mapping[str, str]) -> bool:
    """Whether NCCL of this version (None: there is none) connects several ranks on one GPU."""
    return version is not None and version >= _SEVERAL_RANKS_SINCE and environ.get(SEVERAL_RANKS) == "1"


def group_backends(kind: str, nccl: tuple[int, ...] | None, environ: Mapping[str, str], *, share: bool) -> str:
    """The backends of process groups whose ranks compute on `kind` (cuda, cpu), as torch names them.

    NCCL refuses two ranks on one GPU unless `nccl_shares_gpus`. Where it refuses, gloo also carries the GPU's tensors:
    it copies them through its own pinned memory in every collective that ppctl calls (all_reduce, all_gather,
    reduce_scatter, all_to_all, broadcast); a pipeline's channels make these copies themselves. All ranks must decide
    alike, so the answer does not depend on the number of GPUs.
    """
    if kind == "cpu" or (share and not nccl_shares_gpus(nccl, environ)):
        return "gloo"
    return "cpu:gloo,cuda:nccl"


def loopback_variables() -> dict[str, str]:
    """Variables with which gloo and NCCL use only the loopback interface, for ranks of one machine."""
    name = "lo0" if sys.platform == "darwin" else "lo"
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": f"={name}"}
