"""Kernels and memory of a GPU, before the first message: a pass on made-up inputs, and the memory of a step.

CUDA loads a kernel at its first launch, and waits for that until the device is idle. If torch's allocator has no cached
block and the driver no memory, it frees cached blocks, and cudaFree waits until the whole device is idle. A posted
receive is a kernel that runs until its message comes. So the first step, whose receives are posted ahead, must not be
the first to launch a kernel, and no step may free memory: two ranks would wait for each other for ever. The dry pass
also compiles, tunes and makes workspaces while no rank waits.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ppctl.comm.buffers import Message, MessageSpec, TensorLike
from ppctl.comm.channels import Arrival
from ppctl.engine.engine_error import EngineError
from ppctl.engine.stage import Stage, StageProgram
from ppctl.schedule.action import Action, B, F, I, Schedule, W


def dry_pass(
    program: StageProgram, schedule: Schedule, pp_rank: int, mb: int, device: torch.device, *, training: bool = True
) -> int:
    """Run one stage's forward of microbatch `mb` on made-up values, and with `training` its backward as in the
    schedule. Returns the bytes of the GPU that a microbatch keeps from its forward to its backward.

    Inputs have the shapes that the program's specs declare; if shapes may vary, declare usual ones. Parameters receive
    gradients. Raises EngineError, which names the failed action; the original error is its cause.
    """
    is_last, split = program.stage == schedule.placement.num_stages - 1, (program.stage, mb) in schedule.split
    stage = Stage(
        program,
        is_last=is_last,
        training=training,
        deallocate_outputs=True,
        split=(mb,) * split,
        hands_back=schedule.gradient_leaves(program.stage),
    )
    actions = [Action(op, program.stage, mb) for op in ((F, I, W) if split else (F, B))]
    at, held = 0, _held(device)
    try:
        if program.stage > 0:
            stage.inbox[mb] = Arrival(_made_up(program.receives, program.stage, device))
        stage.wait_for_input(mb)
        stage.forward(mb)
        held = _held(device) - held
        if not training:
            return held
        at = 1
        if not is_last:
            stage.gradient_inbox[mb] = Arrival(_made_up(program.sends, program.stage, device))
        stage.wait_for_gradient(mb)
        stage.backward(mb)
        if split:
            at = 2
            stage.weight_gradients(mb)
    except Exception as error:
        raise EngineError(pp_rank, actions, at, error) from error
    return held


def _held(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def representatives(kinds: Iterable[Hashable]) -> list[int]:
    """Microbatches of a stage that together run all of its kernels; `kinds` has the kind of each microbatch, in order.

    One of each kind, twice: the second time, gradients are added to those of the first.
    """
    latest = {kind: mb for mb, kind in enumerate(kinds)}
    return [*latest.values(), *latest.values()]


def _made_up(specs: Sequence[TensorLike], seed: int, device: torch.device) -> Message:
    """Values of unit variance, so that routers choose different experts. No generator of the run is touched."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(shape or (), generator=generator, device="cpu").to(device, dtype)
        for shape, dtype in MessageSpec.of(specs)
    )


FRAGMENTS = 0.05
"""The share of a peak that fragmentation may take; a plan that leaves less free is called tight."""
_ROUNDING = 2**21
"""Large blocks are multiples of this many bytes."""
_SMALL = 2**19
"""Bytes of a block that torch keeps apart from larger ones (up to 1 MiB)."""


def reserve(device: torch.device, peak: int, in_flight: int, varying: int = 0) -> int:
    """Make the allocator's cache hold `peak` bytes, including those in use; returns how many bytes the device lacks.

    Call it after a pass of one microbatch, whose small blocks are needed `in_flight` times. At most half of what is
    still free is taken in addition, for fragmentation and for up to `varying` bytes that depend on the data.
    """
    stats = _stats(device)
    small = in_flight * _unused(stats, "small_pool")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    missing = max(0, peak - torch.cuda.memory_allocated(device))
    more = min(int(FRAGMENTS * peak) + varying, max(0, free - missing) // 2)
    most = free - free // 20  # the driver and NCCL need some
    sizes = [*_divisible(min(missing + more, most), stats), *[_SMALL] * (small // _SMALL)]
    try:
        kept = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    except torch.OutOfMemoryError:  # another process has taken the memory
        return missing
    del kept  # the cache has them now
    return max(0, missing - free)


def _divisible(size: int, stats: Mapping[str, Any]) -> list[int]:
    """The sizes of blocks, together `size` bytes, from which requests of any size can be served.

    If the user's `max_split_size_mb` forbids dividing larger blocks, one large block would serve only equally large
    requests.
    """
    most = stats.get("max_split_size", -1) - _ROUNDING
    return [size] if most <= 0 else [*[most] * (size // most), size % most]


class AllocatorFigures(NamedTuple):
    """Counters of torch's caching allocator in this process; zeros on a CPU, which has none."""

    retries: int = 0
    """How often the allocator has freed memory and waited for the device."""
    driver_allocations: int = 0
    """How often the allocator has asked the driver for memory."""
    unused: int = 0
    """Bytes that the allocator holds and no tensor uses."""

    @classmethod
    def of(cls, device: torch.device) -> AllocatorFigures:
        """The present counters."""
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
