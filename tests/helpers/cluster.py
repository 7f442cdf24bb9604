"""The tests' own SLURM: why it cannot run here, its commands, and what a test waits for."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from command import TINY, environment

T = TypeVar("T")
SLURM = Path(__file__).parents[1] / "slurm"
ROOT = SLURM.parents[1]
PATIENCE = 240.0
"""Seconds for anything that includes a start of ranks: CI's machines import torch slowly."""
SMALL = ("+recipe=quickstart", *TINY, "vpp=1")
TWO = ("nodes=2", "gpus_per_node=1", "pp=2")


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if os.getuid() != 0:
        return "SLURM's daemons want root"
    if not os.access("/etc/hosts", os.W_OK):
        return "/etc/hosts, in which the nodes get their names, cannot be written"
    absent = [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]
    return f"{', '.join(absent)} not installed: tests/slurm/cluster.sh install" if absent else None


@dataclass(frozen=True)
class Cluster:
    """A SLURM that runs, and a directory to submit from."""

    conf: Path
    cwd: Path

    def command(self, *words: str, timeout: float = 60, **more: str) -> subprocess.CompletedProcess[str]:
        """Run one command in the cluster's environment; `more` reaches the ranks of what it submits."""
        variables = environment(SLURM_CONF=str(self.conf), **more)
        variables["PYTHONPATH"] = f"{SLURM / 'faults'}{os.pathsep}{variables['PYTHONPATH']}"
        variables.pop("COLUMNS", None)  # a job's log is no terminal
        return subprocess.run(words, cwd=self.cwd, env=variables, capture_output=True, text=True, timeout=timeout)

    def ppctl(self, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run ppctl."""
        return self.command(sys.executable, "-m", "ppctl", *words, **more)

    def submit(self, *overrides: str, **more: str) -> Submitted:
        """Submit a small run."""
        done = self.ppctl("submit", *SMALL, *overrides, "--json", **more)
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        return Submitted(self, Path(told["run"]), told["job"])

    def job(self, number: str, key: str) -> str:
        """One value of `scontrol show job`."""
        text = self.command("scontrol", "-o", "show", "job", number).stdout
        return next((word.partition("=")[2] for word in text.split() if word.startswith(f"{key}=")), "")

    def end(self, number: str) -> float:
        """When a job ended, to the second; since the epoch."""
        return time.mktime(time.strptime(self.job(number, "EndTime"), "%Y-%m-%dT%H:%M:%S"))

    def lose(self, node: str, job: str, number: int = signal.SIGSTOP) -> set[int]:
        """Stop a node's daemon, its step daemons and the job's ranks at once, as if the machine were gone; or kill."""
        found: set[int] = set()
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError, IndexError):
                words = set((entry / "environ").read_text(errors="replace").split("\0"))
                command = (entry / "cmdline").read_text().replace("\0", " ")
                if f"{self.conf} -N {node} " in command:
                    found.add(int(entry.name))
                elif {f"SLURM_JOB_ID={job}", f"SLURMD_NODENAME={node}", f"SLURM_CONF={self.conf}"} <= words:
                    parent = re.findall(r"PPid:\s+([0-9]+)", (entry / "status").read_text())[0]
                    found |= {int(entry.name), int(parent)}
        for process in found:
            with suppress(ProcessLookupError):  # some die with their agent
                os.kill(process, number)
        return found

    def wait_for(self, number: str, *states: str) -> str:
        """Wait until the job is in one of `states`; returns it."""
        return wait(lambda: (state := self.job(number, "JobState")) in states and state, f"job {number}: {states}")


@dataclass(frozen=True)
class Submitted:
    """A run behind sbatch."""

    cluster: Cluster
    run: Path
    job: str

    def ends(self) -> str:
        """Wait for the job's end; its state."""
        return self.cluster.wait_for(self.job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def trains(self, steps: int = 1) -> None:
        """Wait until the run has done so many steps."""
        wait(lambda: len(self.metrics()) >= steps, f"{steps} steps of {self.run}\n{self.log()}")

    def metrics(self) -> list[dict[str, float]]:
        """What metrics.jsonl says."""
        file = self.run / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def numbers(self) -> list[tuple[float, ...]]:
        """Step, loss and gradient norm of every step."""
        return [(row["step"], row["loss"], row["grad_norm"]) for row in self.metrics()]

    def starts(self) -> list[dict[str, object]]:
        """What env.json says of its lives."""
        return self.told("env.json").get("starts", [])

    def log(self) -> str:
        """The job's log."""
        file = self.run / "logs" / "job.log"
        return file.read_text() if file.exists() else ""

    def told(self, name: str) -> dict[str, object]:
        """One of the run's JSON files."""
        return json.loads((self.run / name).read_text())

    def told_errors(self) -> list[dict[str, object]]:
        """The error records of all its lives."""
        return [json.loads(file.read_text()) for file in self.run.glob("errors*/rank-*.json")]

    def status(self) -> dict[str, object]:
        """What `ppctl status --json` says."""
        return json.loads(self.cluster.ppctl("status", str(self.run), "--json").stdout)

    @contextmanager
    def without(self, node: str) -> Iterator[float]:
        """Inside the body a node stands still, as if it were gone; the body gets the time at which it stopped."""
        stopped, began = self.cluster.lose(node, self.job), time.time()
        assert len(stopped) >= 3
        try:
            yield began
        finally:
            for number in stopped:
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGCONT)

    def restarts(self) -> int:
        """How often SLURM has started the job again."""
        return int(self.cluster.job(self.job, "Restarts"))

    def processes(self) -> dict[int, int]:
        """The process number of every rank that lives, by rank: whose stderr is a rank's log has become that rank."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                words = (process / "environ").read_text(errors="replace").split("\0")
                mine = f"SLURM_JOB_ID={self.job}" in words and f"SLURM_CONF={self.cluster.conf}" in words
                log = re.search(r"/rank-(\d+)\.log", os.readlink(process / "fd" / "2"))
                if mine and log and "ppctl.rank.worker" in (process / "cmdline").read_text():
                    found[int(log[1])] = int(process.name)
        return found


def wait(found: Callable[[], T], what: str, patience: float = PATIENCE) -> T:
    """Wait until `found` says something true, and return it."""
    deadline = time.monotonic() + patience
    while not (value := found()):
        assert time.monotonic() < deadline, f"waited {patience} s for {what}"
        time.sleep(0.25)
    return value
