"""torch's profiler on every rank, in the steps of `log.torch_profile`; on a GPU with the history of its memory.

Knows torch's profiler and where torchtitan writes: profile_traces/iteration_N/rankM_trace.json, and
memory_snapshot/iteration_N/rankM_memory_snapshot.pickle, which https://docs.pytorch.org/memory_viz shows. Must not know
what a step does. Without the key nothing is imported, and a step costs one call that returns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from ppctl.config.quantities import steps_of
from ppctl.config.schema import RunConfig

TRACES, SNAPSHOTS = "profile_traces", "memory_snapshot"
_MOST_EVENTS = 100_000
"""Entries of a memory history: torchtitan's number."""


def step_profiles(
    config: RunConfig,
    rank: int,
    device: torch.device,
    directory: Path | None,
    say: Callable[[str], None],
    writes: Callable[[int], None],
) -> Callable[[int], AbstractContextManager[None]]:
    """What a step (from 1) runs inside of. `directory` is the run's; None, or no key, profiles nothing.

    `writes` is called with the step when a rank turns to its files: they are no part of the step, nor of its limit.
    """
    if config.log.torch_profile is None or directory is None:
        nothing = nullcontext()
        return lambda step: nothing
    steps = steps_of(config.log.torch_profile)
    if rank == 0 and device.type != "cuda":
        say("note: log.torch_profile: memory snapshots are of GPUs; on the CPU there are traces alone")
    return lambda step: _profiled(step, rank, device, directory, writes) if step in steps else nullcontext()


@contextmanager
def _profiled(
    step: int, rank: int, device: torch.device, directory: Path, writes: Callable[[int], None]
) -> Iterator[None]:
    """Record a step; the files are written behind it, when the device is through."""
    from torch.profiler import ProfilerActivity, profile

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    if on_gpu:
        torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
    try:
        with profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
            yield
            if on_gpu:
                torch.cuda.synchronize(device)
            writes(step)  # what the profiler has gathered is put in order when it ends
        _write(directory / TRACES / f"iteration_{step}" / f"rank{rank}_trace.json", recorded.export_chrome_trace)
        if on_gpu:
            file = directory / SNAPSHOTS / f"iteration_{step}" / f"rank{rank}_memory_snapshot.pickle"
            _write(file, torch.cuda.memory._dump_snapshot)
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)


def _write(file: Path, write: Callable[[str], object]) -> None:
    """Under its own name when it is whole: half a trace looks like one until a viewer reads it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_name(f".{file.name}.tmp")
    write(str(draft))
    draft.replace(file)
