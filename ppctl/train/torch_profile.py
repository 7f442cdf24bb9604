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
"""Of a memory's history: torchtitan's number."""


def step_profiles(
    config: RunConfig,
    rank: int,
    device: torch.device,
    directory: Path | None,
    say: Callable[[str], None],
    writing: Callable[[int], None] = lambda done: None,
) -> Callable[[int], AbstractContextManager[None]]:
    """What a step (from 1) runs inside of. `directory` is the run's; None, or no key, profiles nothing.

    `writing(completed steps before it)` is called when the step is over and its files are written, which may take
    longer than a step ever does.
    """
    if config.log.torch_profile is None or directory is None:
        nothing = nullcontext()
        return lambda step: nothing
    steps = steps_of(config.log.torch_profile)
    if rank == 0 and device.type != "cuda":
        say("note: log.torch_profile: memory snapshots are of GPUs; on the CPU there are traces alone")
    return lambda step: _profiled(step, rank, device, directory, writing) if step in steps else nullcontext()


@contextmanager
def _profiled(
    step: int, rank: int, device: torch.device, directory: Path, writing: Callable[[int], None]
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
            writing(step - 1)
        recorded.export_chrome_trace(str(_file(directory / TRACES, step, f"rank{rank}_trace.json")))
        if on_gpu:
            name = f"rank{rank}_memory_snapshot.pickle"
            torch.cuda.memory._dump_snapshot(str(_file(directory / SNAPSHOTS, step, name)))
    finally:
        if on_gpu:
            torch.cuda.memory._record_memory_history(enabled=None)


def _file(directory: Path, step: int, name: str) -> Path:
    path = directory / f"iteration_{step}"
    path.mkdir(parents=True, exist_ok=True)
    return path / name
