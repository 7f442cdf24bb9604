"""`ppctl` as a person runs it: a process of its own, in a directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TINY = (
    "model.num_layers=6",
    "model.hidden_size=16",
    "model.ffn_hidden_size=24",
    "model.num_attention_heads=2",
    "model.num_query_groups=1",
    "seq=16",
    "gbs=8",
    "mbs=1",
    "optim.warmup_steps=2",
    "launch.device=cpu",
)
"""Overrides of the quickstart that make a step take milliseconds."""

STARTED: list[subprocess.Popen[str]] = []
"""What was started and may still run; the test's end ends it."""

FAULTS = Path(__file__).parents[1] / "faults"


def environment(**more: str) -> dict[str, str]:
    """This process's environment with one thread a rank, without colours and without the pytest's own variables."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "PPCTL_", "SLURM_", "TORCHELASTIC_"))}
    path = os.pathsep.join(filter(None, (str(FAULTS), plain.get("PYTHONPATH"))))  # a checkout beside the installed one
    return plain | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONPATH": path} | more


def start(*arguments: str, cwd: Path, within: Sequence[str] = (), **more: str) -> subprocess.Popen[str]:
    """Start `ppctl arguments` in `cwd`, behind the words of a program that starts others."""
    process = subprocess.Popen(
        [*within, sys.executable, "-m", "ppctl", *arguments],
        cwd=cwd,
        env=environment(**more),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    STARTED.append(process)
    return process


def ppctl(*arguments: str, cwd: Path, timeout: float = 90, **more: str) -> subprocess.CompletedProcess[str]:
    """Run `ppctl arguments` in `cwd` to its end."""
    process = start(*arguments, cwd=cwd, **more)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def only_run(cwd: Path) -> Path:
    """The one run directory under cwd/runs."""
    (config,) = cwd.glob("runs/*/*/config.yaml")
    return config.parent


def metrics(run: Path) -> list[dict[str, object]]:
    """The records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[object]:
    return [record["loss"] for record in metrics(run)]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def alive(where: Path, program: str = "ppctl.rank.worker") -> list[int]:
    """The processes of a program that run in `where` (a zombie that nobody has reaped yet does not run)."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and program.encode() in (entry / "cmdline").read_bytes():
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if state not in "ZX" and (entry / "cwd").resolve() == where.resolve():
                    found.append(int(entry.name))
    return found
