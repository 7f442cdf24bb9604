"""Saves and loads against torch's distributed checkpoints, a bare copy in memory and dd, on the same disk.

    python benchmarks/checkpoint.py [--ranks 2] [--mib 100] [--seconds 180] [--directory runs/bench] [--out benchmarks]

All contenders run inside the same processes and take turns, so that a noisy neighbour hits all of them; figures are
medians over rounds, of the slowest rank each, and ratios are of figures of one round. The first save of each is told
apart. Needs a core free for the writer besides one a rank; the page says how busy the machine was, and of every goal
whether it was met. It begins no round after `--seconds`, and makes at least two. It is no test.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import Tensor

from ppctl.checkpoint import reading
from ppctl.checkpoint.saver import BackgroundSaver, Saver
from ppctl.checkpoint.shards import whole_shards
from ppctl.checkpoint.writer import NO_WRITER, WriterProcess

TENSORS, STEPS = 24, 10
Row = dict[str, float]


def main() -> None:
    """Measure, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=100, help="of state, a rank")
    parser.add_argument("--seconds", type=float, default=180.0, help="no round begins later")
    parser.add_argument("--directory", type=Path, default=Path("runs/bench"), help="on the disk to measure")
    parser.add_argument("--out", type=Path, default=Path("benchmarks"))
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    busy = os.getloadavg()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as root:
        found = os.path.join(root, "found.pt")
        context = mp.get_context("spawn")
        ranks = [
            context.Process(target=_rank, args=(rank, arguments.ranks, arguments.mib, arguments.seconds, root, found))
            for rank in range(arguments.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        rounds: list[dict[str, Row]] = torch.load(found)
    page = _page(rounds, arguments, busy)
    path = arguments.out / f"results-checkpoint-{date.today()}.md"
    path.write_text(page)
    print(page)


def _rank(rank: int, world: int, mib: int, seconds: float, root: str, found: str) -> None:
    began = time.monotonic()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(os.path.join(root, "store"), world), rank=rank, world_size=world
    )
    addresses = [WriterProcess().address if rank == 0 else NO_WRITER]
    dist.broadcast_object_list(addresses)
    bench = _Bench(rank, mib, Path(root), addresses[0])
    results = [bench.round(number) for number in range(3)]
    while bench.agreed(time.monotonic() - began < seconds):
        results.append(bench.round(len(results)))
    bench.saver.close()
    if rank == 0:
        torch.save(results, found)
    dist.barrier()
    dist.destroy_process_group()


class _Bench:
    """What one rank holds, and one round of all contenders."""

    def __init__(self, rank: int, mib: int, root: Path, address: str) -> None:
        self.rank, self.root, self.mib = rank, root, mib
        size = mib * 2**20 // 4 // TENSORS
        self.state: dict[str, Tensor] = {f"rank.{rank}.w{n}": torch.randn(size // 64, 64) for n in range(TENSORS)}
        self.bytes = sum(tensor.nbytes for tensor in self.state.values())
        self.copies = {name: tensor.clone() for name, tensor in self.state.items()}
        self.work = torch.randn(384, 384)
        self.shards = whole_shards(self.state)
        self.saver = BackgroundSaver(
            root / "background", self.shards, keep=0, process_group=dist.new_group(backend="gloo"), address=address,
            warn=lambda problem: print(problem),
        )  # fmt: skip
        self.own = dist.new_group(backend="gloo")

    def agreed(self, more: bool) -> bool:
        """Whether all ranks want more."""
        number = torch.tensor(int(more))
        dist.all_reduce(number, dist.ReduceOp.MIN)
        return bool(number)

    def round(self, number: int) -> dict[str, Row]:
        """Every contender once; the order turns from round to round."""
        turns: list[tuple[str, Callable[[int], Row]]] = [
            ("memcpy", self.memcpy),
            ("dd", self.dd),
            ("ppctl async", self.background),
            ("DCP async_save", self.dcp_async),
            ("ppctl", self.at_once),
            ("DCP save", self.dcp),
        ]
        turns = turns[number % len(turns) :] + turns[: number % len(turns)]
        results = {name: self._slowest(turn(number)) for name, turn in turns}
        results["ppctl load"] = self._slowest(self.load(self.root / "at once" / f"step-{number}"))
        results["DCP load"] = self._slowest(self.dcp_load(self.root / f"dcp-{number}"))
        dist.barrier()
        if self.rank == 0:
            for name in (f"dcp-{number}", f"dcp-async-{number}", "background", "at once"):
                shutil.rmtree(self.root / name)
            os.sync()  # what one round has written is no other's
        dist.barrier()
        return results

    def _slowest(self, row: Row) -> Row:
        numbers = torch.tensor(list(row.values()))
        dist.all_reduce(numbers, dist.ReduceOp.MAX)
        return dict(zip(row, numbers.tolist(), strict=True))

    def _steps(self) -> float:
        """The median seconds of some steps of training, with a collective each."""
        seconds = []
        for _ in range(STEPS):
            began = time.perf_counter()
            for _ in range(8):
                self.work = (self.work @ self.work).tanh_()
            dist.all_reduce(self.work[0].clone())
            seconds.append(time.perf_counter() - began)
        return statistics.median(seconds)

    def memcpy(self, number: int) -> Row:
        """The state copied once, in memory."""
        dist.barrier()
        began = time.perf_counter()
        for name, tensor in self.state.items():
            self.copies[name].copy_(tensor)
        return {"seconds": time.perf_counter() - began}

    def dd(self, number: int) -> Row:
        """As many bytes by dd with fsync, all ranks at once."""
        source = Path("/dev/shm") / f"ppctl-bench-{os.getpid()}"
        source.write_bytes(os.urandom(2**20) * (self.bytes // 2**20))
        target = self.root / f"dd-{self.rank}"
        command = ["dd", f"if={source}", f"of={target}", "bs=16M", "conv=fsync", "status=none"]
        dist.barrier()
        began = time.perf_counter()
        subprocess.run(command, check=True)
        seconds = time.perf_counter() - began
        source.unlink()
        target.unlink()
        return {"seconds": seconds}

    def _beside(self, begin: Callable[[], Any], finish: Callable[[Any], object]) -> Row:
        before = self._steps()
        held = _restart_peak()
        dist.barrier()
        began = time.perf_counter()
        handle = begin()
        stall = time.perf_counter() - began
        after = self._steps()
        finish(handle)
        seconds = time.perf_counter() - began
        return {"stall": stall, "inflation": after / before, "seconds": seconds, "memory": _memory("VmHWM") - held}

    def background(self, number: int) -> Row:
        """checkpoint.async."""
        row = self._beside(lambda: self.saver.begin(number, self.shards, {}), lambda _: self.saver.finish())
        return row | {"memory": (row["memory"] + self.saver.memory.size) / self.bytes}  # its copy is there all the time

    def dcp_async(self, number: int) -> Row:
        """DCP's, with its defaults."""
        path = str(self.root / f"dcp-async-{number}")

        def begin() -> Any:
            return dcp.async_save(dict(self.state), checkpoint_id=path, process_group=self.own)

        row = self._beside(begin, lambda future: getattr(future, "upload_completion", future).result())
        return row | {"memory": row["memory"] / self.bytes}

    def at_once(self, number: int) -> Row:
        """checkpoint.async=false."""
        return self._timed(lambda: Saver(self.root / "at once", keep=0).save(number, self.shards, {}))

    def dcp(self, number: int) -> Row:
        """DCP's save."""
        return self._timed(lambda: dcp.save(dict(self.state), checkpoint_id=str(self.root / f"dcp-{number}")))

    def load(self, path: Path) -> Row:
        """What was saved at once, from the page cache, every digest compared."""
        return self._timed(lambda: reading.load(path, self.shards))

    def dcp_load(self, path: Path) -> Row:
        """The same of DCP, which compares nothing."""
        return self._timed(lambda: dcp.load(dict(self.state), checkpoint_id=str(path)))

    def _timed(self, work: Callable[[], object]) -> Row:
        dist.barrier()
        began = time.perf_counter()
        work()
        return {"seconds": time.perf_counter() - began}


def _memory(key: str) -> int:
    """Bytes of this process, by a line of /proc/self/status."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def _restart_peak() -> int:
    """From now on VmHWM is the peak; what is held now."""
    Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


class _Goal(NamedTuple):
    what: str
    values: list[float]
    """Of each round."""
    least: float = -math.inf
    most: float = math.inf
    judged: bool = True
    """Whether this machine can show it."""

    def line(self) -> str:
        """A row of the table."""
        value = statistics.median(self.values)
        bound = f"at least {self.least}" if self.least > -math.inf else f"at most {self.most}"
        verdict = "met" if self.least <= value <= self.most else "missed"
        verdict = f"{verdict if self.judged else 'not judged: no core is free for the writer'}"
        bound = bound if math.isfinite(self.least) or math.isfinite(self.most) else ""
        found = f"{value:.2f} ({min(self.values):.2f} to {max(self.values):.2f})"
        return f"| {self.what} | {found} | {bound} | {verdict if bound else ''} |"


def _page(rounds: list[dict[str, Row]], arguments: argparse.Namespace, busy: tuple[float, float, float]) -> str:
    first, *rest = rounds
    total = arguments.ranks * arguments.mib

    def median(name: str, key: str = "seconds") -> float:
        return statistics.median(each[name][key] for each in rest)

    def ratios(one: tuple[str, str], other: tuple[str, str]) -> list[float]:
        return [each[one[0]][one[1]] / each[other[0]][other[1]] for each in rest]

    def numbers(name: str, key: str) -> list[float]:
        return [each[name][key] for each in rest]

    lines = [
        f"# Checkpoints against torch's, {date.today()}",
        "",
        f"`python benchmarks/checkpoint.py --ranks {arguments.ranks} --mib {arguments.mib}`, "
        f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, load before: "
        f"{', '.join(f'{each:.1f}' for each in busy)}. {total} MiB of state in all. Medians of {len(rest)} rounds; the "
        "ratio of each round, its median and range.",
        "",
        "| | seconds | MiB/s | stall | steps beside | first save: seconds, stall |",
        "|---|---|---|---|---|---|",
    ]
    for name in ("memcpy", "dd", "ppctl async", "DCP async_save", "ppctl", "DCP save", "ppctl load", "DCP load"):
        beside = "stall" in first[name]
        stall, inflation = (f"{median(name, 'stall'):.3f}", f"{median(name, 'inflation'):.2f}x") if beside else ("", "")
        begin = f"{first[name]['seconds']:.2f}" + (f", {first[name]['stall']:.3f}" if beside else "")
        seconds = median(name)
        lines.append(f"| {name} | {seconds:.3f} | {total / seconds:,.0f} | {stall} | {inflation} | {begin} |")
    ours, theirs, free = "ppctl async", "DCP async_save", (os.cpu_count() or 1) > arguments.ranks
    goals = [
        _Goal("stall / one memcpy", ratios((ours, "stall"), ("memcpy", "seconds")), most=1.3),
        _Goal("stall / DCP async_save's", ratios((ours, "stall"), (theirs, "stall"))),
        _Goal("steps beside a save / steps before", numbers(ours, "inflation"), most=1.05, judged=free),
        _Goal("steps beside a save / beside DCP's", ratios((ours, "inflation"), (theirs, "inflation")), most=1.0),
        _Goal("save's throughput / dd's", ratios(("dd", "seconds"), ("ppctl", "seconds")), least=0.9),
        _Goal("save's throughput / DCP save's", ratios(("DCP save", "seconds"), ("ppctl", "seconds")), least=1.0),
        _Goal("load's speed / DCP load's", ratios(("DCP load", "seconds"), ("ppctl load", "seconds")), least=1.2),
        _Goal("peak extra memory of a rank / its state", numbers(ours, "memory"), most=1.1),
        _Goal("peak extra memory beside DCP async_save / state", numbers(theirs, "memory")),
    ]
    lines += ["", "| ratio | found | goal | verdict |", "|---|---|---|---|", *(goal.line() for goal in goals)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
