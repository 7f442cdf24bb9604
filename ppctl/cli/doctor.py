"""`ppctl doctor`: is this machine (or this job) fit to train: versions, devices, the file system, every edge.

Knows what is good enough, and prints what is wrong first. Measures messages in processes of their own, because this one
must not import torch. Under torchrun or srun every process is one rank of the measurement, and rank 0 tells.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ppctl
from ppctl.cli.table import aligned
from ppctl.errors import ConfigError, Problem
from ppctl.launch.environment import Started, choose_port, detect, rank_environment

DEADLINE = 240.0
"""Seconds for all ranks to start and measure."""
_SIZE = 64 * 2**20
_SLOW_DISK, _SLOW_SYNC = 50e6, 0.5
_OLDEST = (2, 11)
SMALL_SHM = 64 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes between which edges are timed (2)")
    parser.add_argument("--dir", default=".", metavar="DIR", help="where runs would go: its file system is timed")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and tell: 0 where nothing is wrong, else 1."""
    if not 1 <= args.ranks <= 64:
        raise ConfigError(Problem("PP-E641", f"--ranks {args.ranks}: 1 to 64 processes", "--ranks 2", "command line"))
    started = detect(os.environ)
    measured = _as_rank(started) if started.is_rank else _measure(args.ranks)
    if started.is_rank and started.rank != 0:
        return 0
    here = {"disk": _disk(Path(args.dir)), "shared_memory_bytes": _shared_memory(), "gpus": _gpus()}
    found = here | measured
    wrong = list(_wrong(found))
    if args.json:
        print(json.dumps(found | {"wrong": wrong}, indent=1))
    else:
        print("\n".join(_lines(found, wrong)))
    return int(bool(wrong))


def _measure(ranks: int) -> dict[str, Any]:
    """Start the ranks of the measurement here."""
    if find_spec("torch") is None:
        return {
            "versions": None,
            "edges": [],
            "failure": "torch is not installed: plan, simulate and submit work, train does not",
        }
    port = choose_port({})
    command = [sys.executable, "-m", "ppctl.reach.probe"]
    started = []
    for rank in range(ranks):
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        environment = rank_environment(rank, ranks, port, {})
        started.append(subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.PIPE, text=True))
    try:
        out, error = started[0].communicate(timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        out, error = "", f"nothing came of it in {DEADLINE:.0f} s"
    finally:
        for process in started:
            process.kill()
            process.wait()
    return _read(out, error)


def _as_rank(started: Started) -> dict[str, Any]:
    """Take part in a measurement of a job that others started."""
    command = [sys.executable, "-m", "ppctl.reach.probe"]
    environment = os.environ | dict(started.variables)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE, check=False)
    return _read(done.stdout, done.stderr) if started.rank == 0 else {}


def _read(out: str, error: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
    except (IndexError, ValueError):
        last = next((line for line in reversed(error.splitlines()) if line.strip()), "no output")
        return {"versions": None, "edges": [], "failure": f"the ranks could not be started: {last}"}
    return found | {"failure": None}


def _disk(where: Path) -> dict[str, Any]:
    """Bytes per second of a write that is synced, and seconds of a small one: what a checkpoint and a status cost."""
    block = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=where, prefix=".ppctl-doctor-") as file:
            began = time.perf_counter()
            for _ in range(_SIZE // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            large = time.perf_counter() - began
            began = time.perf_counter()
            file.write(b"x")
            file.flush()
            os.fsync(file.fileno())
            return {
                "path": str(where.resolve()),
                "bytes_per_s": _SIZE / large,
                "sync_s": time.perf_counter() - began,
                "error": None,
            }
    except OSError as error:
        return {"path": str(where.resolve()), "bytes_per_s": None, "sync_s": None, "error": error.strerror}


def _shared_memory() -> int | None:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _gpus() -> int:
    """NVIDIA devices that the kernel knows, whatever torch sees: laptops without any have its CUDA build too."""
    return sum(1 for device in Path("/dev").glob("nvidia*") if device.name.removeprefix("nvidia").isdigit())


def _wrong(found: dict[str, Any]) -> Iterator[str]:
    """Everything that is not as it should be, the worst first."""
    if found["failure"]:
        yield found["failure"]
    for edge in found["edges"]:
        if edge["error"]:
            source, target = edge["hosts"]
            yield f"rank {edge['source']} on {source} does not reach rank {edge['target']} on {target}: {edge['error']}"
    versions = found["versions"] or {}
    if versions and tuple(int(part) for part in versions["torch"].split("+")[0].split(".")[:2]) < _OLDEST:
        yield f"torch {versions['torch']} is older than {'.'.join(map(str, _OLDEST))}"
    if versions and versions["cuda"] and found["gpus"] and not versions["devices"]:
        yield f"torch sees none of the {found['gpus']} GPUs that are here: nvidia-smi tells more"
    disk = found["disk"]
    if disk["error"]:
        yield f"{disk['path']} cannot be written: {disk['error']}"
    elif disk["bytes_per_s"] < _SLOW_DISK or disk["sync_s"] > _SLOW_SYNC:
        yield f"{disk['path']} is slow: {disk['bytes_per_s'] / 1e6:.0f} MB/s, {1e3 * disk['sync_s']:.0f} ms for a sync"
    if found["shared_memory_bytes"] is not None and found["shared_memory_bytes"] < SMALL_SHM:
        yield "less than 64 MiB of shared memory are left in /dev/shm"
    yield from _uneven(found["edges"])


def _uneven(edges: list[dict[str, Any]]) -> Iterator[str]:
    """Edges far slower than the usual one."""
    speeds = sorted(edge["bytes_per_s"] for edge in edges if edge["bytes_per_s"])
    for edge in edges:
        if edge["bytes_per_s"] and len(speeds) > 2 and edge["bytes_per_s"] < speeds[len(speeds) // 2] / 4:
            yield f"the edge from rank {edge['source']} to rank {edge['target']} is four times slower than usual"


def _lines(found: dict[str, Any], wrong: list[str]) -> list[str]:
    lines = [f"wrong: {line}" for line in wrong] or ["nothing is wrong"]
    lines += ["", *_software(found["versions"])]
    disk, shared = found["disk"], found["shared_memory_bytes"]
    if disk["error"] is None:
        speed = f"{disk['bytes_per_s'] / 1e6:.0f} MB/s written and synced, {_time(disk['sync_s'])} for a small file"
        lines.append(f"disk     {disk['path']}: {speed}")
    if shared is not None:
        lines.append(f"memory   {shared / 2**30:.1f} GiB free in /dev/shm")
    if found["edges"]:
        rows = [["edge", "from", "to", "latency", "bandwidth (16 MiB)"]]
        for edge in found["edges"]:
            told = ["no answer", ""]
            if not edge["error"]:
                told = [_time(edge["latency_s"]), f"{edge['bytes_per_s'] / 1e9:.2f} GB/s"]
            rows.append([f"{edge['source']} -> {edge['target']}", *edge["hosts"], *told])
        lines += ["", aligned(rows)]
    return lines


def _software(versions: dict[str, Any] | None) -> list[str]:
    lines = [f"ppctl    {ppctl.__version__}"]
    if versions is None:
        return lines
    cuda = f"CUDA {versions['cuda']}, NCCL {versions['nccl']}" if versions["cuda"] else "without CUDA"
    lines.append(f"torch    {versions['torch']} ({cuda}), Python {versions['python']}")
    lines.append(f"devices  {', '.join(versions['devices']) or 'no GPU: ranks run on the CPU, over gloo'}")
    return lines


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"
