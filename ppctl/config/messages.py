"""Rules on how messages between stages travel: which of parallel's modes go together, and with what else.

Knows the fields about point-to-point messages. Must not know schedules or torch.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config.keys import Finding, did_you_mean
from ppctl.config.schema import ParallelConfig, RunConfig

BACKENDS = ("nccl", "gloo", "ucc")

_BATCH, _OVERLAP = "parallel.batch_p2p_comm", "parallel.overlap_p2p_comm"
_BACKEND = "parallel.pipeline_model_parallel_comm_backend"


def in_batches(parallel: ParallelConfig) -> bool:
    """Whether neighbouring messages are one batch that a rank waits for, instead of travelling while it computes."""
    return parallel.batch_p2p_comm or not parallel.overlap_p2p_comm


def broken_rules(config: RunConfig) -> Iterator[Finding]:
    """Every rule that is broken."""
    parallel = config.parallel
    if parallel.overlap_p2p_comm and parallel.batch_p2p_comm:
        message = "a batch of messages is waited for before the rank goes on, so that it cannot overlap what comes then"
        yield (_BATCH, _OVERLAP), message, f"{_OVERLAP}=false"
    if parallel.batch_p2p_sync and not parallel.batch_p2p_comm:
        message = "batch_p2p_sync synchronises behind the batches of batch_p2p_comm, and that is off"
        yield ("parallel.batch_p2p_sync", _BATCH), message, "parallel.batch_p2p_sync=false"
    if config.pipeline.p2p_capacity is not None and in_batches(parallel):
        message = "behind a batch no message is under way: a capacity is for messages that overlap"
        yield ("pipeline.p2p_capacity", _BATCH, _OVERLAP), message, "pipeline.p2p_capacity=null"
    yield from _backend(config)


def _backend(config: RunConfig) -> Iterator[Finding]:
    name = config.parallel.pipeline_model_parallel_comm_backend
    if name is not None and name not in BACKENDS:
        message = f"{_BACKEND} is one of {', '.join(BACKENDS)}{did_you_mean(name, BACKENDS)}"
        yield (_BACKEND,), message, f"{_BACKEND}=null"
    elif name == "nccl" and config.launch.device == "cpu":
        yield (_BACKEND, "launch.device"), "nccl moves tensors of GPUs, and the device is the CPU", f"{_BACKEND}=null"
