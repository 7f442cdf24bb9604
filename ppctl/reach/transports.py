"""Whether each transport of a pipeline's messages works between ranks, and how fast: a miniature pipeline over all.

Knows schedules, the engine and communicators. Must not know runs, plans or configs.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from ppctl.comm.buffers import Message
from ppctl.comm.communicator import Communicator
from ppctl.comm.groups import gather_values
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule

TRANSPORTS = ("plain", "channels")
"""In the order in which they are tried: what is proved elsewhere first, as nothing can follow on a hang."""
ELEMENTS = 2**20
"""Float32 elements of a message: 4 MiB."""
_CALLS = 4
_FACTOR = 2.0
"""The weight of every stage: products and sums of powers of two are exact on any device."""


def try_transport(transport: str, device: torch.device, limit: float, elements: int = ELEMENTS) -> dict[str, Any]:
    """One row: `transport`, `seconds` of a schedule call, and the `error` of the first rank that has one.

    A collective over the world. A transport that hangs is told after `limit` seconds; the process can then do nothing
    more with its groups.
    """
    results: SimpleQueue[float | Exception] = SimpleQueue()
    Thread(target=partial(_report, results, transport, device, elements), name=transport, daemon=True).start()
    seconds, error = None, None
    try:
        result = results.get(timeout=limit)
    except Empty:
        return {"transport": transport, "seconds": None, "error": f"no answer within {limit:g} s"}
    if isinstance(result, Exception):
        error = (str(result).splitlines() or [type(result).__name__])[0]
    else:
        seconds = result
    rows = gather_values(tuple[float | None, str | None], (seconds, error), everywhere=True)
    wrong = next((f"rank {rank}: {row[1]}" for rank, row in enumerate(rows) if row[1]), None)
    return {"transport": transport, "seconds": None if wrong else max(row[0] for row in rows), "error": wrong}


def _report(results: SimpleQueue[float | Exception], transport: str, device: torch.device, elements: int) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        results.put(_seconds_of_a_call(transport, device, elements))
    except Exception as error:
        results.put(error)


def _seconds_of_a_call(transport: str, device: torch.device, elements: int) -> float:
    """The median of several calls of interleaved 1F1B, whose messages go round. Raises RuntimeError for wrong sums."""
    group = dist.group.WORLD
    assert group is not None  # the ranks have joined it
    made = make_schedule("interleaved_1f1b", pp=group.size(), vpp=2, num_microbatches=2 * group.size())
    schedule = lower(made, batched=transport == "plain")
    communicator = Communicator(group, channels=schedule.capacities, device=device, transport=transport)
    stages = schedule.placement.stages_of(group.rank())
    weights = {stage: torch.full((), _FACTOR, device=device, requires_grad=True) for stage in stages}
    programs = [_program(schedule, stage, weight, elements) for stage, weight in weights.items()]
    times = []
    for _ in range(_CALLS):
        began = time.perf_counter()
        run_schedule(schedule, programs, communicator)
        for weight in weights.values():
            _check(weight, schedule)
        times.append(time.perf_counter() - began)
    communicator.close()
    return statistics.median(times[1:])


def _program(schedule: Schedule, stage: int, weight: torch.Tensor, elements: int) -> StageProgram:
    """Stage number `stage`: its input times the weight; the first one has ones, and the last one returns the mean."""
    last = stage == schedule.placement.num_stages - 1
    message = [torch.empty(elements, device="meta")]

    def forward(mb: int, inputs: Message) -> Message:
        out = (inputs[0] if inputs else torch.ones(elements, device=weight.device)) * weight
        return (out.mean() if last else out,)

    return StageProgram(stage, forward, receives=message if stage else [], sends=[] if last else message)


def _check(weight: torch.Tensor, schedule: Schedule) -> None:
    """Every microbatch's loss is the product of all weights: the gradient of one is that over the weight."""
    expected = schedule.num_microbatches * _FACTOR ** (schedule.placement.num_stages - 1)
    assert weight.grad is not None  # the schedule has run its backwards
    if (found := weight.grad.item()) != expected:
        raise RuntimeError(f"a gradient is {found:g}, and {expected:g} is right: messages went wrong")
    weight.grad = None
