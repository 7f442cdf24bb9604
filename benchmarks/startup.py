"""What ppctl's launcher costs: from the command to the first step's line, against plain process starts.

    python benchmarks/startup.py [--pairs 7] [--ranks 4]

The plain side starts as many processes with the same environment, each of which makes the same imports, meets the same
way, makes the same process groups, builds the same stages from a run directory that is there already, runs the first
step and prints (`startup_rank.py`). It composes nothing, plans nothing, makes no run directory, warms nothing up, and
nobody watches it. Pairs alternate within one run, so that a noisy machine hits both; the floor of the ratio is the
fastest of each side. Time is a person's: from starting the first process to reading the line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ppctl.host.private_files import NODE_DIRECTORY
from ppctl.launch.environment import rank_environment
from ppctl.runs.rundir import RunDir

MOST = 1.15
RANK = Path(__file__).with_name("startup_rank.py")
TRAIN = [sys.executable, "-m", "ppctl", "train", "+recipe=quickstart", "launch.device=cpu", "vpp=1", "steps=1000"]


def first_step_of_ppctl(ranks: int, where: Path) -> tuple[float, dict[str, float]]:
    """Seconds to the first step's line, and rank 0's phases."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [*TRAIN, f"pp={ranks}", "log.dir=runs"], cwd=where, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    next(line for line in process.stdout if line.startswith("step"))
    seconds = time.perf_counter() - began
    newest = RunDir(max((where / "runs" / "quickstart").iterdir(), key=lambda path: path.stat().st_mtime))
    phases = newest.status()["start_up"] | {"first step": newest.metrics()[0]["step_time_s"]}
    rest, before = seconds - sum(phases.values()), _cpu_seconds()
    process.send_signal(signal.SIGINT)
    process.communicate()
    return seconds, phases | {"the rest": rest, "CPU of all": _cpu_seconds() - before}


def first_step_of_plain_processes(ranks: int, run: Path) -> tuple[float, dict[str, float]]:
    """The same without a launcher."""
    began = time.perf_counter()
    directory = tempfile.mkdtemp()
    processes = [
        subprocess.Popen(
            [sys.executable, str(RANK), str(run)],
            env=rank_environment(rank, ranks, {"PYTHONPATH": str(ROOT), NODE_DIRECTORY: directory}),
            stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # as ppctl's: the kernel shares a busy machine out by session
        )
        for rank in range(ranks)
    ]
    assert processes[0].stdout is not None
    line = next(line for line in processes[0].stdout if line.startswith("step"))
    seconds, before = time.perf_counter() - began, _cpu_seconds()
    for process in processes:
        process.kill()
        process.wait()
    shutil.rmtree(directory)
    phases: dict[str, float] = json.loads(line.partition(" ")[2])
    rest = seconds - sum(phases.values())
    return seconds, phases | {"the rest": rest, "CPU of all": _cpu_seconds() - before}


def _cpu_seconds() -> float:
    """Of all processes that have ended: on a busy machine it tells more than a clock."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=4)
    asked = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it, and so would ranks
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        first_step_of_ppctl(asked.ranks, where)  # makes the run directory that the plain side reads, and warms the disk
        (run,) = (where / "runs" / "quickstart").iterdir()
        rows = []
        for pair in range(asked.pairs):
            sides = [
                lambda: first_step_of_ppctl(asked.ranks, where),
                lambda: first_step_of_plain_processes(asked.ranks, run),
            ]
            order = (0, 1) if pair % 2 == 0 else (1, 0)
            found = {side: sides[side]() for side in order}
            rows.append((found[0], found[1]))
    return report(rows, asked.ranks)


Side = tuple[float, dict[str, float]]


def report(rows: list[tuple[Side, Side]], ranks: int) -> int:
    """Print the ratio and where the difference goes; 0 where the floor is held."""
    ratios = [ours[0] / plain[0] for ours, plain in rows]
    floor = min(ours[0] for ours, _ in rows) / min(plain[0] for _, plain in rows)
    medians = [statistics.median(row[side][0] for row in rows) for side in (0, 1)]
    print(f"{ranks} ranks, {len(rows)} alternating pairs, {os.cpu_count()} cores")
    print(f"ppctl train {medians[0]:.2f} s, plain processes {medians[1]:.2f} s, medians")
    print(f"ratio: median of a pair {statistics.median(ratios):.3f}, fastest against fastest {floor:.3f} (<= {MOST})")
    print(f"\n{'phase':<12}{'ppctl':>8}{'plain':>8}   seconds on rank 0, medians")
    phases = [[row[side][1] for row in rows] for side in (0, 1)]
    for name in dict.fromkeys(name for side in phases for each in side for name in each):
        cells = [statistics.median(each.get(name, 0.0) for each in side) for side in phases]
        print(f"{name:<12}{cells[0]:>8.2f}{cells[1]:>8.2f}")
    return int(floor > MOST)


if __name__ == "__main__":
    raise SystemExit(main())
