"""`python -m ppctl.reach.probe`, started once per rank: measures messages between neighbours, and tries transports.

Rank 0 prints JSON objects, one a line. The first has versions, and a row for every edge of the ring, measured one edge
at a time: seconds of a message of 4 bytes, bytes per second of a large one. The row of an edge that does not answer
within its limit has the error. Several GPUs also get an object for each transport, tried with a miniature pipeline over
all ranks; the first transport that fails is the last.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from ppctl.comm.buffers import Message
from ppctl.comm.communicator import Communicator
from ppctl.comm.groups import gather_values, nccl_version
from ppctl.engine.interpreter import run_schedule
from ppctl.engine.stage import StageProgram
from ppctl.host.devices import device_type, group_backends
from ppctl.reach.store import connect
from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule

TRANSPORTS = ("plain", "channels")
"""In the order in which they are tried: the one proved elsewhere first, as a hang ends the tests."""
ELEMENTS = 2**20
"""Float32 elements of a message: 4 MiB."""
_CALLS = 4
_FACTOR = 2.0
"""The weight of every stage: products and sums of powers of two are exact on any device."""


def try_transport(transport: str, device: torch.device, limit: float, elements: int = ELEMENTS) -> dict[str, Any]:
    """One row: `transport`, `seconds` of a schedule call, and the `error` of the first rank that has one. A collective
    over the world. A hanging transport is reported after `limit` seconds; then the process's groups are unusable.
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
    assert group is not None  # the ranks have joined the world
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
    """The program of stage `stage`: its input times the weight; the first stage has ones, the last returns the mean."""
    last = stage == schedule.placement.num_stages - 1
    message = [torch.empty(elements, device="meta")]

    def forward(mb: int, inputs: Message) -> Message:
        out = (inputs[0] if inputs else torch.ones(elements, device=weight.device)) * weight
        return (out.mean() if last else out,)

    return StageProgram(stage, forward, receives=message if stage else [], sends=[] if last else message)


def _check(weight: torch.Tensor, schedule: Schedule) -> None:
    """Raise RuntimeError if the gradient is not what the schedule's messages must make of it."""
    expected = schedule.num_microbatches * _FACTOR ** (schedule.placement.num_stages - 1)
    assert weight.grad is not None  # set: the schedule has run its backwards
    if (found := weight.grad.item()) != expected:
        raise RuntimeError(f"a gradient is {found:g}, but {expected:g} is right: messages went wrong")
    weight.grad = None


LIMIT = 20.0
"""Seconds that one edge may take."""
TRIAL = 60.0
"""Seconds that one transport may take."""
LARGE = 4 * 2**20
"""Float32 elements of the large message: 16 MiB."""
_ROUNDS = 5


def main() -> int:
    """Measure and print; returns 0 if every edge answered, else 1. Ends the process if a transport fails."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = device_of(rank, world, os.environ, torch.cuda.device_count())
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backends = group_backends(device.type, None, os.environ, share=False)
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group(backends, store=connect(rank, world, limit), rank=rank, world_size=world, timeout=limit)
    hosts = gather_values(str, socket.gethostname(), everywhere=True)
    edges = [_edge(source, (source + 1) % world, hosts, device) for source in range(world)] if world > 1 else []
    if rank == 0:
        print(json.dumps({"versions": versions(), "device": device.type, "ranks": world, "edges": edges}), flush=True)
    if any(edge["error"] for edge in edges):
        return 1
    return _try_transports(rank, device) if device.type == "cuda" and world > 1 else 0


def _try_transports(rank: int, device: torch.device) -> int:
    for transport in TRANSPORTS:
        row = try_transport(transport, device, TRIAL)
        if rank == 0:
            print(json.dumps(row), flush=True)
        if row["error"]:
            os._exit(1)  # its messages may be under way for ever
    return 0


def device_of(rank: int, world: int, environ: Mapping[str, str], gpus: int) -> torch.device:
    """The device that a rank measures with, on a machine with `gpus`: as in a run with launch.device=any."""
    kind = device_type("any", gpus, int(environ.get("LOCAL_WORLD_SIZE", world)), share=False)
    return torch.device(kind, int(environ.get("LOCAL_RANK", rank))) if kind == "cuda" else torch.device(kind)


def versions() -> dict[str, Any]:
    """Versions of installed packages, and the devices of this machine."""
    nccl = nccl_version()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "devices": devices,
        "gloo": dist.is_gloo_available(),
    }


def _edge(source: int, target: int, hosts: list[Any], device: torch.device) -> dict[str, Any]:
    """One edge's row, measured by its two ranks while all others wait. A collective over the world."""
    measured: tuple[float | None, float | None, str | None] = None, None, None
    if dist.get_rank() in (source, target):
        try:
            measured = _seconds(source, target, 1, device), _seconds(source, target, LARGE, device), None
        except RuntimeError as error:
            measured = None, None, str(error).splitlines()[0]
    rows = gather_values(tuple[float | None, float | None, str | None], measured, everywhere=True)
    small, large, failure = rows[source]
    wrong = failure or rows[target][2]
    return {
        "source": source,
        "target": target,
        "hosts": [hosts[source], hosts[target]],
        "error": wrong,
        "latency_s": None if wrong else small,
        "bytes_per_s": None if wrong else 4 * LARGE / large,
    }


def _seconds(source: int, target: int, elements: int, device: torch.device) -> float:
    """Seconds that a message takes from `source` to `target`: half of a round trip, the median of several. Both ranks
    call this together."""
    tensor = torch.zeros(elements, device=device)
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        if dist.get_rank() == source:
            dist.send(tensor, target)
            dist.recv(tensor, target)
        else:
            dist.recv(tensor, source)
            dist.send(tensor, source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - began) / 2)
    return sorted(times)[_ROUNDS // 2]


if __name__ == "__main__":
    code = main()
    dist.destroy_process_group()
    sys.exit(code)
