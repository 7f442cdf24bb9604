"""Where a step's seconds go: the time of each kernel under `torch.profiler`, by its class.

Knows kernels' names. On a CPU, torch's operations stand for kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

ELEMENTWISE, OTHERS = "elementwise and reductions", "others"
CLASSES = {
    "messages": "nccl",
    "attention": "triton_tem_fused_flex flash fmha cudnn attention",
    "products": "triton_tem gemm gemv cutlass cublas nvjet splitk ::mm addmm bmm scaled_mm",
    "optimizer": "multi_tensor adam foreach",
    "copies": "memcpy memset copy aten::cat",
    ELEMENTWISE: "elementwise reduce norm softmax silu gelu index gather scatter embedding sort "
    "aten::mul aten::add aten::sub aten::div aten::sum aten::exp aten::pow aten::fill aten::zero",
}
"""Parts of names in small letters, of which the first that a name has decides."""
LONGEST = 15


class Kernel(NamedTuple):
    """One run of a kernel."""

    name: str
    begin: float
    end: float
    """Seconds on the profile's clock."""


def class_of(name: str) -> str:
    """The class of a kernel's name. What torch's compiler fused is named after all that is in it."""
    small = name.lower()
    if small.startswith("triton_") and not small.startswith("triton_tem"):
        return ELEMENTWISE
    return next((kind for kind, parts in CLASSES.items() if any(part in small for part in parts.split())), OTHERS)


def seconds_of(runs: Iterable[tuple[str, float]]) -> dict[str, Any]:
    """Seconds by class, and the kernels with the most seconds, of (name, seconds) of every run."""
    total: dict[str, tuple[float, int]] = {}
    classes = dict.fromkeys((*CLASSES, OTHERS), 0.0)
    for name, seconds in runs:
        before, calls = total.get(name, (0.0, 0))
        total[name] = before + seconds, calls + 1
        classes[class_of(name)] += seconds
    longest = sorted(total.items(), key=lambda item: -item[1][0])[:LONGEST]
    rows = [
        {"name": name, "class": class_of(name), "seconds": seconds, "calls": calls}
        for name, (seconds, calls) in longest
    ]
    return {"classes": classes, "longest": rows}


def busy(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one kernel ran: those of two streams at a time count once."""
    seconds, until = 0.0, float("-inf")
    for _, begin, end in sorted(kernels, key=lambda kernel: kernel.begin):
        seconds += max(0.0, end - max(begin, until))
        until = max(until, end)
    return seconds


def profiled(run: Callable[[], object], device: str) -> dict[str, Any]:
    """`run`'s seconds between idle moments of the device, those without any kernel, by class, and the longest kernels.

    The profiler slows the host, so that a device that waits for it waits longer than without.
    """
    cuda = device == "cuda"
    settle = torch.cuda.synchronize if cuda else (lambda: None)
    with profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]) as found:
        settle()
        begun = time.perf_counter()
        run()
        settle()
        wall = time.perf_counter() - begun
    events = [event for event in found.events() if not event.is_user_annotation]
    if cuda:
        kernels = [
            Kernel(event.name, event.time_range.start / 1e6, event.time_range.end / 1e6)
            for event in events
            if event.device_type == DeviceType.CUDA
        ]
        runs, worked = [(name, end - begin) for name, begin, end in kernels], busy(kernels)
    else:
        runs = [(event.name, event.self_cpu_time_total / 1e6) for event in events]
        worked = sum(seconds for _, seconds in runs)
    return {"wall_s": wall, "idle_s": max(0.0, wall - worked), "kernels": len(runs)} | seconds_of(runs)
