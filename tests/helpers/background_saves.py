"""Saves beside training as tests make them: with the node's writer or without, and a writer that dies at a moment."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from command import FAULTS, alive

from ppctl.checkpoint.saver import BackgroundSaver
from ppctl.checkpoint.shards import Shard
from ppctl.checkpoint.writer import NO_WRITER, WriterProcess

PROGRAM = "ppctl.checkpoint.writer"


def saver_of(
    directory: Path,
    shards: Iterable[Shard],
    *,
    writer: bool,
    keep: int = 0,
    fault: str = "",
    warnings: list | None = None,
) -> BackgroundSaver:
    """A saver of this rank, with a writer that rank 0 starts. `fault` is as PPCTL_FAULT."""
    ranked = dist.is_initialized()
    rank, addresses = dist.get_rank() if ranked else 0, [NO_WRITER]
    if writer and rank == 0:
        os.environ |= {"PYTHONPATH": str(FAULTS), "RANK": "0", "PPCTL_FAULT": fault or "none 0 0 -"}
        addresses = [WriterProcess().address]
    if ranked:
        dist.broadcast_object_list(addresses)
    said = [] if warnings is None else warnings
    group = dist.new_group(backend="gloo") if ranked else None
    return BackgroundSaver(
        directory,
        shards,
        keep=keep,
        address=addresses[0],
        process_group=group,
        warn=lambda problem: said.append(problem),
    )


def forked(work: Callable[[], None], cwd: Path) -> int:
    """A process that does `work` in `cwd`, without the tests' handlers."""
    child = os.fork()
    if child == 0:
        try:
            os.chdir(cwd)
            work()
        finally:
            os._exit(0)
    return child


def writer_ends(cwd: Path) -> bool:
    """Whether no writer runs in `cwd` after a moment."""
    deadline = time.monotonic() + 10
    while alive(cwd, PROGRAM) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not alive(cwd, PROGRAM)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL, to processes that may have ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
