"""The phases of a restart: seconds on four "nodes" of two ranks on this machine, and what grows with the ranks.

    python benchmarks/restart_phases.py [--kills 3]              # a rank is killed; a table of seconds by phase
    python benchmarks/restart_phases.py --counts 64 256 2048     # what so many ranks ask, send and open in each phase

A node is torchrun's agent with two ranks, a process tree of its own; what its agents do is torchrun's, what ranks do is
ppctl's. From outside are seen: when the first other rank ends (`detect`), when the last old one has gone (`end`), when
all new ones are there (`rendezvous`). What follows is the run's own record of its start (`start_up` of status.json,
which `ppctl status` shows): `import` with rank 0's planning, `groups` with the ranks' rendezvous and roll call,
`warm-up` are the first messages. `the rest` is the time before the first step that no phase has. Seconds are of
processes that share this machine's cores, and say nothing about GPUs or a network. Counts are exact: ppctl's code, a
thread a rank (`tests/helpers/restart_counts.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from command import TINY, environment, free_port, metrics
from restart_counts import phases

NODES, RANKS = 4, 2
TRAIN = ("train", "+recipe=quickstart", *TINY, "pp=4", "dp=2", "vpp=1", f"nodes={NODES}", f"gpus_per_node={RANKS}")
OF_RANKS = ("import", "groups", "build", "warm-up", "load")
WORDS = ("stage", "rank", "bubble", "and", "a", "layer")


class Nodes:
    """The agents of all nodes, and their ranks."""

    def __init__(self, where: Path, kills: int) -> None:
        text = where / "corpus.txt"
        text.write_text(" ".join(random.Random(0).choices(WORDS, k=3000)))
        self.where = where
        endpoint = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", f"--nproc-per-node={RANKS}"]
        command += [f"--max-restarts={kills}", "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=night"]
        command += ["--local-addr=127.0.0.1", "-m", "ppctl", *TRAIN, f"data.path={text}", "steps=100000"]
        self.agents = [
            subprocess.Popen(
                [*command, "checkpoint.interval=2"],
                cwd=where,
                env=environment(SLURMD_NODENAME=f"node-{node}", PYTHONPATH=str(ROOT)),
                stdout=subprocess.DEVNULL,
                stderr=(where / f"node-{node}.txt").open("w"),
                start_new_session=True,
            )
            for node in range(NODES)
        ]

    def ranks(self, node: int) -> set[int]:
        """The processes of a node's ranks that live."""
        pid = self.agents[node].pid
        with suppress(OSError):
            return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split() if _lives(each)}
        return set()

    @property
    def all_ranks(self) -> set[int]:
        return set().union(*map(self.ranks, range(NODES)))

    @property
    def run(self) -> Path | None:
        return next((path.parent for path in self.where.glob("runs/*/*/metrics.jsonl")), None)

    def steps(self) -> int:
        """The last step that has a record."""
        with suppress(OSError, ValueError, IndexError):
            return 0 if self.run is None else int(metrics(self.run)[-1]["step"])  # type: ignore[call-overload]
        return 0

    def until(self, condition: Callable[[], bool], limit: float = 240.0) -> float:
        """The moment at which `condition` holds."""
        end = time.monotonic() + limit
        while not condition():
            if time.monotonic() > end or any(agent.poll() is not None for agent in self.agents):
                raise SystemExit("".join(path.read_text()[-3000:] for path in self.where.glob("node-*.txt")))
            time.sleep(0.02)
        return time.monotonic()

    def restart(self) -> dict[str, float]:
        """Kill a rank of node 1; the seconds of each phase until the first step's record."""
        before, victim = self.all_ranks, min(self.ranks(1))
        (run,) = filter(None, [self.run])
        old, began = _status(run)["start_up"], time.monotonic()
        os.kill(victim, signal.SIGKILL)
        seen = self.until(lambda: len(before & self.all_ranks) < len(before) - 1)
        gone = self.until(lambda: not before & self.all_ranks)
        written = (run / "metrics.jsonl").stat().st_mtime_ns
        new = self.until(lambda: len(self.all_ranks) == NODES * RANKS)
        loaded = self.until(lambda: _status(run).get("start_up") not in (None, old))
        first = self.until(lambda: (run / "metrics.jsonl").stat().st_mtime_ns != written)
        seconds = {"detect": seen - began, "end": gone - seen, "rendezvous": new - gone}
        seconds |= {name: _status(run)["start_up"][name] for name in OF_RANKS}
        rest = loaded - began - sum(seconds.values())
        return seconds | {"the rest": rest, "first step": first - loaded, "whole": first - began}

    def end(self) -> None:
        for agent in self.agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
        for pid in self.all_ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _lives(pid: str) -> bool:
    """Whether a process exists and is no zombie."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _status(run: Path) -> dict[str, dict[str, float]]:
    with suppress(ValueError, OSError):
        return dict(json.loads((run / "status.json").read_text()))
    return {}


def measure(kills: int) -> None:
    """Print seconds by phase: the median of all kills, and the least and the most."""
    with tempfile.TemporaryDirectory() as directory:
        nodes = Nodes(Path(directory), kills)
        try:
            nodes.until(lambda: nodes.steps() >= 6)
            lives = []
            for _ in range(kills):
                lives.append(nodes.restart())
                last = nodes.steps()
                nodes.until(lambda last=last: nodes.steps() >= last + 6)
        finally:
            nodes.end()
    print(f"{NODES} nodes x {RANKS} ranks, {kills} kills of a rank, {os.cpu_count()} cores\n")
    print("| phase | s, median | least | most |\n|---|--:|--:|--:|")
    for name in lives[0]:
        column = [life[name] for life in lives]
        print(f"| {name} | {statistics.median(column):.2f} | {min(column):.2f} | {max(column):.2f} |")


def count(sizes: Sequence[int]) -> None:
    """Print what ranks ask, send and open by phase, in all and of the one process that has most."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    print("| phase | ranks | requests to the store | values read | most of a rank | connections | most of a host |")
    print("|---|--:|--:|--:|--:|--:|--:|")
    for ranks in sizes:
        for name, row in phases(ranks).items():
            cells = [
                f"{row[key]:,}" for key in ("requests", "read", "most_requests", "connections", "most_connections")
            ]
            print(f"| {name} | {ranks:,} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--counts", type=int, nargs="+", metavar="RANKS")
    asked = parser.parse_args()
    if asked.counts:
        count(asked.counts)
    else:
        measure(asked.kills)


if __name__ == "__main__":
    main()
