"""`ppctl doctor`: versions, devices, the file system, and messages between ranks, on this machine or in a job.

Other processes measure messages, because this one must not import torch. Under torchrun or srun every process is one
rank of the measurement, and rank 0 prints.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import ppctl
from ppctl.cli.console import aligned
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.private_files import NODE_DIRECTORY, own_directory, shared_memory
from ppctl.host.processes import python
from ppctl.launch.environment import Started, detect, rank_environment
from ppctl.launch.machine import gpu_devices

_PROBE = "ppctl.reach.probe"
_DEADLINE_S = 240.0
_LATE = f"no result after {_DEADLINE_S:.0f} s"
_WRITTEN_BYTES = 64 * 2**20
_SLOW_DISK, _SLOW_SYNC = 50e6, 0.5
_OLDEST_TORCH = (2, 11)
_SMALL_SHM = 64 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "number of ranks to start and measure, 1 to 64 (default: 2)"
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help=words)
    words = "measure the file system of this directory (default: the working directory)"
    parser.add_argument("--dir", default=".", metavar="DIR", help=words)
    parser.add_argument("--model", metavar="DIR", help=argparse.SUPPRESS)  # refused, with the command to type instead
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure; rank 0 prints. Exit code 1 if something is wrong, else 0. Raises ConfigError for --model, --ranks."""
    if args.model is not None:
        remedy = f"ppctl plan {pasted(f'model.from={args.model}')} model.implementation=transformers"
        raise ConfigError(Problem("PP-E116", "doctor checks no --model: a plan proves that a model can be cut", remedy))
    if not 1 <= args.ranks <= 64:
        raise ConfigError(Problem("PP-E641", f"--ranks {args.ranks}: it must be 1 to 64", "--ranks 2", "command line"))
    started = detect(os.environ)
    measured = _as_rank(started) if started.is_rank else _measure(args.ranks)
    if started.is_rank and started.rank != 0:
        return 0
    machine = {"disk": _disk(Path(args.dir)), "shared_memory_bytes": _shared_memory(), "gpus": gpu_devices()}
    report = machine | measured
    wrong = list(_wrong(report))
    if args.json:
        print(json.dumps(report | {"wrong": wrong}, indent=1))
    else:
        print("\n".join(_lines(report, wrong)))
    return int(bool(wrong))


def _measure(ranks: int) -> dict[str, Any]:
    if find_spec("torch") is None:
        return _failure("torch is not installed: plan, simulate and submit work, train does not")
    started = []
    with own_directory(shared_memory()) as directory:
        for rank in range(ranks):
            pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            environment = rank_environment(rank, ranks, {}) | {NODE_DIRECTORY: str(directory)}
            started.append(subprocess.Popen(python(_PROBE), env=environment, stdout=pipe, stderr=pipe, text=True))
        try:
            out, error = started[0].communicate(timeout=_DEADLINE_S)
        except subprocess.TimeoutExpired:
            out, error = "", _LATE
        finally:
            for process in started:
                process.kill()
                process.wait()
    return _read(out, error)


def _as_rank(started: Started) -> dict[str, Any]:
    environment = os.environ | dict(started.variables)
    command = python(_PROBE)
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_DEADLINE_S)
        out, error = done.stdout, done.stderr
    except subprocess.TimeoutExpired:
        out, error = "", _LATE
    return _read(out, error) if started.rank == 0 else {}


def _read(out: str, error: str) -> dict[str, Any]:
    try:
        rows: list[dict[str, Any]] = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
        measured, *transports = rows
    except ValueError:
        last = next((line for line in reversed(error.splitlines()) if line.strip()), "no output")
        return _failure(f"the ranks could not be started: {last}")
    return measured | {"transports": transports, "failure": None}


def _failure(text: str) -> dict[str, Any]:
    return {"versions": None, "edges": [], "transports": [], "failure": text}


def _disk(where: Path) -> dict[str, Any]:
    """Bytes per second of a large synced write (a checkpoint), and seconds of a small one (status.json)."""
    disk: dict[str, Any] = {"path": str(where.resolve()), "bytes_per_s": None, "sync_s": None, "error": None}
    try:
        with open(where / f".ppctl-doctor-{secrets.token_hex(8)}", "xb") as file:
            os.unlink(file.name)
            disk["bytes_per_s"] = _WRITTEN_BYTES / _synced(file, [os.urandom(2**20)] * (_WRITTEN_BYTES // 2**20))
            disk["sync_s"] = _synced(file, [b"x"])
    except OSError as error:
        disk |= {"bytes_per_s": None, "error": error.strerror}
    return disk


def _synced(file: IO[bytes], blocks: Iterable[bytes]) -> float:
    """Write the blocks and sync; returns the seconds that this takes."""
    began = time.perf_counter()
    file.writelines(blocks)
    file.flush()
    os.fsync(file.fileno())
    return time.perf_counter() - began


def _shared_memory() -> int | None:
    try:
        room = os.statvfs("/dev/shm")
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def _wrong(report: dict[str, Any]) -> Iterator[str]:
    """The problems of a report as lines of text, the most severe first."""
    if report["failure"]:
        yield report["failure"]
    yield from _broken(report)
    versions = report["versions"]
    if versions and tuple(map(int, versions["torch"].split("+")[0].split(".")[:2])) < _OLDEST_TORCH:
        yield f"torch {versions['torch']} is older than {'.'.join(map(str, _OLDEST_TORCH))}"
    if versions and versions["cuda"] and report["gpus"] and not versions["devices"]:
        yield f"torch sees none of the {report['gpus']} GPUs of this machine: nvidia-smi shows more"
    disk = report["disk"]
    if disk["error"]:
        yield f"{disk['path']} cannot be written: {disk['error']}"
    elif disk["bytes_per_s"] < _SLOW_DISK or disk["sync_s"] > _SLOW_SYNC:
        yield f"{disk['path']} is slow: {disk['bytes_per_s'] / 1e6:.0f} MB/s, {1e3 * disk['sync_s']:.0f} ms for a sync"
    if report["shared_memory_bytes"] is not None and report["shared_memory_bytes"] < _SMALL_SHM:
        yield "less than 64 MiB of shared memory are left in /dev/shm"
    yield from _slow_edges([edge for edge in report["edges"] if edge["bytes_per_s"]])


def _broken(report: dict[str, Any]) -> Iterator[str]:
    for edge in report["edges"]:
        if edge["error"]:
            source, target = edge["hosts"]
            yield f"rank {edge['source']} on {source} does not reach rank {edge['target']} on {target}: {edge['error']}"
    for row in report["transports"]:
        if row["error"] and row["transport"] == "plain":
            yield f"launch.transport=plain fails between these ranks: {row['error']}"


def _slow_edges(edges: list[dict[str, Any]]) -> Iterator[str]:
    usual = statistics.median_high(edge["bytes_per_s"] for edge in edges) if len(edges) > 2 else 0.0
    for edge in edges:
        if edge["bytes_per_s"] < usual / 4:
            yield f"the edge from rank {edge['source']} to rank {edge['target']} is four times slower than usual"


def _lines(report: dict[str, Any], wrong: list[str]) -> list[str]:
    lines = [f"wrong: {line}" for line in wrong] or ["nothing is wrong"]
    lines += ["", *_software(report["versions"]), *_too_few_gpus(report)]
    disk, shared = report["disk"], report["shared_memory_bytes"]
    if disk["error"] is None:
        speed = f"{disk['bytes_per_s'] / 1e6:.0f} MB/s written and synced, {_time(disk['sync_s'])} for a small file"
        lines.append(f"disk     {disk['path']}: {speed}")
    if shared is not None:
        lines.append(f"memory   {shared / 2**30:.1f} GiB free in /dev/shm")
    lines += _transports(report["transports"])
    if report["edges"]:
        rows = [["edge", "from", "to", "latency", "bandwidth (16 MiB)"]]
        for edge in report["edges"]:
            measured = ["no answer", ""]
            if not edge["error"]:
                measured = [_time(edge["latency_s"]), f"{edge['bytes_per_s'] / 1e9:.2f} GB/s"]
            rows.append([f"{edge['source']} -> {edge['target']}", *edge["hosts"], *measured])
        lines += ["", aligned(rows)]
    return lines


def _transports(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return ["messages no launch.transport was tried: that takes at least two ranks with a GPU each"]
    lines = []
    for row in rows:
        result = f"no: {row['error']}" if row["error"] else f"right, {_time(row['seconds'])} a call of a miniature"
        lines.append(f"messages launch.transport={row['transport']}: {result}")
    sound = [row for row in rows if not row["error"]]
    if sound:
        fastest = min(sound, key=lambda row: row["seconds"])["transport"]
        lines.append(f"         take launch.transport={fastest}{' (the default on CUDA)' * (fastest == 'plain')}")
    return lines


def _software(versions: dict[str, Any] | None) -> list[str]:
    lines = [f"ppctl    {ppctl.__version__}"]
    if versions is None:
        return lines
    cuda = f"CUDA {versions['cuda']}, NCCL {versions['nccl']}" if versions["cuda"] else "without CUDA"
    lines.append(f"torch    {versions['torch']} ({cuda}), Python {versions['python']}")
    lines.append(f"devices  {', '.join(versions['devices']) or 'no GPU: ranks run on the CPU, over gloo'}")
    return lines


def _too_few_gpus(report: dict[str, Any]) -> list[str]:
    gpus = len(report["versions"]["devices"]) if report["versions"] else 0
    if not gpus or report.get("device") != "cpu":
        return []
    return [
        f"         fewer GPUs than ranks: measured on the CPU; launch.share_gpu=true lets a run's ranks share {gpus}"
    ]


def _time(seconds: float) -> str:
    return f"{1e6 * seconds:.0f} us" if seconds < 1e-3 else f"{1e3 * seconds:.1f} ms"
