"""`python -m ppctl.reach.probe`, started once per rank: measures messages between neighbouring ranks.

Knows the rank variables, gloo and NCCL. Must not know runs, plans or configs. Rank 0 prints JSON objects, one a line.
The first: versions, and a row for every edge of the ring, measured one edge at a time: seconds of a message of 4 bytes,
bytes per second of a large one. For an edge that does not answer within its limit the row has the error. Between
several GPUs one for each transport of a pipeline follows (`reach/transports.py`), up to the first that fails.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ppctl.comm.groups import gather_values, nccl_version
from ppctl.host.devices import device_type, group_backends
from ppctl.reach.store import connect
from ppctl.reach.transports import TRANSPORTS, try_transport

LIMIT = 20.0
"""Seconds that one edge may take."""
TRIAL = 60.0
"""Seconds that one transport may take."""
LARGE = 4 * 2**20
"""Float32 elements of the large message: 16 MiB."""
_ROUNDS = 5


def main() -> int:
    """Measure; 0 if every edge answered, else 1."""
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
    """Versions of what is installed, and the devices of this machine."""
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
    """One way, half of a round trip: the median of several."""
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
