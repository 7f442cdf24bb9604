"""The phases of a restart: seconds on four "nodes" of two ranks on this machine, and what grows with the ranks.

    python benchmarks/restart_phases.py [--kills 3]              # a rank is killed; a table of seconds by phase
    python benchmarks/restart_phases.py --counts 64 256 2048     # what so many ranks ask, send and open in each phase

A node is the agent of `ppctl node` with two ranks, a process tree of its own. From outside are seen: when another rank
than the killed one ends (`detect`), when the last old one has gone (`end`), when all new ones are there (`rendezvous`).
What follows is the run's own record of its start (`ppctl status` shows it): `groups` with the ranks' roll call;
`warm-up` are the first messages. `the rest` is the time before the first step that no phase has. The rank is killed
when the processes that wait to become ranks have imported everything. Seconds are of processes that share this
machine's cores, and say nothing about GPUs or a network. Counts are exact: ppctl's code, a thread a rank
(`tests/helpers/restart_counts.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]

from agents import Hosts, kill, until
from command import FAULTS, TINY, only_run
from restart_counts import phases

NODES, RANKS = 4, 2
SLOW = "slow 3 0 -"
"""A stage that waits, so that cores have time for what is nice beside training, as beside GPUs."""
TRAIN = ("+recipe=quickstart", *TINY, "pp=4", "dp=2", "vpp=1", f"nodes={NODES}", f"gpus_per_node={RANKS}")
OF_RANKS = ("import", "groups", "build", "warm-up", "load")
WORDS = ("stage", "rank", "bubble", "and", "a", "layer")


class Nodes(Hosts):
    """The agents of all nodes, and their ranks."""

    def __init__(self, where: Path) -> None:
        text = where / "corpus.txt"
        text.write_text(" ".join(random.Random(0).choices(WORDS, k=3000)))
        words = (*TRAIN, f"data.path={text}", "steps=100000", "checkpoint.interval=2")
        path = os.pathsep.join((str(ROOT), str(FAULTS)))
        super().__init__(where, *words, hosts=range(NODES), PYTHONPATH=path, PPCTL_FAULT=SLOW)

    @property
    def all_ranks(self) -> set[int]:
        return {rank for node in range(NODES) for rank in self.ranks(node)}

    def are_ready(self) -> bool:
        """Whether all that wait to become ranks have imported everything: a thread does, and ends."""
        waiting = [pid for node in range(NODES) for pid in self.waiting(node)]
        with suppress(OSError):
            return len(waiting) == NODES * RANKS and all(len(os.listdir(f"/proc/{pid}/task")) == 1 for pid in waiting)
        return False

    def until(self, condition: Callable[[], bool]) -> float:
        """The moment at which `condition` holds."""
        until(lambda: condition() or any(agent.poll() is not None for agent in self.agents.values()), 240)
        assert condition(), self.said()
        return time.monotonic()

    def restart(self) -> dict[str, float]:
        """Kill a rank of node 1; the seconds of each phase until the first step's record."""
        self.until(self.are_ready)
        before, victim = {*self.all_ranks}, self.ranks(1)[0]
        run = only_run(self.cwd)
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


def _status(run: Path) -> dict[str, dict[str, float]]:
    with suppress(ValueError, OSError):
        return dict(json.loads((run / "status.json").read_text()))
    return {}


def measure(kills: int) -> None:
    """Print seconds by phase: the median of all kills, and the least and the most."""
    with tempfile.TemporaryDirectory() as directory:
        nodes, lives = Nodes(Path(directory)), []
        try:
            for _ in range(kills):
                nodes.wait_for_step(nodes.steps() + 6)
                lives.append(nodes.restart())
        finally:
            kill([agent.pid for agent in nodes.agents.values()])  # all else dies with them
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
                f"{getattr(row, key):,}"
                for key in ("requests", "read", "most_requests", "connections", "most_connections")
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
