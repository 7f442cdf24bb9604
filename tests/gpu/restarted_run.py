"""A run under one agent (`ppctl node`) whose rank 1 is killed in the middle, as its record tells it.

Knows the run's directory. On a GPU it shows whether a new start gets device, memory and connections of killed ranks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppctl.runs.rundir import RunDir

STEPS, EVERY, KILLED = 120, 10, 25
"""Steps of the run, between its checkpoints, and before the kill."""
_LIMIT = 300.0
"""Seconds of everything: a step of `first_run.sh` has a limit of its own."""


def losses_of(run: Path) -> list[float]:
    """The losses of a run's steps."""
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def killed_once(words: Sequence[str]) -> tuple[dict[str, Any], list[float]]:
    """Run `words`, and kill rank 1. Returns what is known of the starts, and the losses of all steps."""
    with tempfile.TemporaryDirectory() as runs, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        free.close()
        command = [sys.executable, "-m", "ppctl", "node", "--rendezvous", address, *words, "nodes=1", "log.interval=1"]
        command += [f"log.dir={runs}", f"checkpoint.interval={EVERY}"]
        print("+", " ".join(command), flush=True)
        agent = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            return _killed(Path(runs), agent)
        finally:
            agent.kill()  # its ranks die with it
            agent.wait()


def _killed(runs: Path, agent: subprocess.Popen[bytes]) -> tuple[dict[str, Any], list[float]]:
    until = time.monotonic() + _LIMIT

    def wait(condition: Callable[[], bool], *, ends: bool = False) -> float:
        while not condition():
            if time.monotonic() > until or (agent.poll() is not None and not ends):
                raise RuntimeError(f"the agent's exit code is {agent.poll()}, of {len(_lines(runs))} steps")
            time.sleep(0.01)
        return time.monotonic()

    wait(lambda: len(_lines(runs)) >= KILLED)
    (run,) = (RunDir(path.parent) for path in runs.rglob("metrics.jsonl"))
    (ranks,) = (record["ranks"] for record in run.heartbeats().values())
    victim = next(int(row["pid"]) for row in ranks if row["rank"] == 1)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    wait(lambda: len(run.environment().get("starts", [])) > 1)
    written = _lines(runs)
    again = wait(lambda: _lines(runs) != written)
    wait(lambda: agent.poll() is not None, ends=True)
    if agent.returncode:
        raise RuntimeError(f"exit code {agent.returncode}")
    starts = run.environment()["starts"]
    return {"starts": [each["why"] for each in starts], "seconds": again - killed}, losses_of(run.path)


def _lines(runs: Path) -> list[str]:
    with suppress(OSError, StopIteration):
        return next(runs.rglob("metrics.jsonl")).read_text().splitlines()
    return []
