"""Shared by commands that take a run: their arguments, the run's facts, and texts that name it."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ppctl.errors import PpctlError, pasted
from ppctl.host.processes import is_gone
from ppctl.runs import checkpoint_folder
from ppctl.runs.finding import find_run
from ppctl.runs.run_starts import QUIET, holder, is_held, quiet_for
from ppctl.runs.rundir import RunDir, warn

RUNS = Path("runs")
"""The directory of all runs, if no other is named."""
DTYPES = ("float64", "float32", "bfloat16", "float16")
"""The dtypes in which weights are read or written."""
T = TypeVar("T")
STARTED = ("starting", "running")
"""States of status.json in which a run has processes."""
LOST = "lost"
"""The state of a run whose status.json says that it runs, but that has no process."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN and --dir, which `named_run` reads."""
    words = "the run: its directory, id, name, a unique prefix, `latest`, or SLURM job (default: the newest run)"
    parser.add_argument("run", nargs="?", metavar="RUN", help=words)
    add_runs_directory(parser)


def add_runs_directory(parser: argparse.ArgumentParser) -> None:
    """Declare --dir."""
    words = "the directory with all runs (default: runs)"
    parser.add_argument("--dir", type=Path, default=RUNS, metavar="DIR", help=words)


def above_0(kind: type[int] | type[float], most: float) -> Callable[[str], float]:
    """The type of an argument that is a number above 0 and at most `most`."""

    def number(text: str) -> float:
        if not 0 < kind(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not a number above 0 and at most {most:,}")
        return kind(text)

    return number


def named_run(args: argparse.Namespace) -> RunDir:
    """The run that RUN and --dir name. Raises ConfigError if there is none, or more than one."""
    return find_run(args.run, args.dir, args.typed)


def program() -> str:
    """The command that calls ppctl here: its name if it is on the PATH, else its path."""
    if shutil.which("ppctl"):
        return "ppctl"
    script = Path(sys.executable).with_name("ppctl")
    return pasted(short_path(script)) if script.exists() else f"{pasted(sys.executable)} -m ppctl"


def short_path(path: Path) -> str:
    """`path`, made relative to the working directory if it lies below that."""
    directory = Path.cwd()
    return str(path.relative_to(directory)) if path.is_relative_to(directory) else str(path)


def facts(run: RunDir) -> dict[str, Any]:
    """The facts of a run that can be read without its plan. Warns of files that cannot be read."""
    status, metrics = run.status(), run.metrics_file(last=1).read()
    state, why = _state(run, status)
    last = metrics[-1] if metrics else {}
    checkpoint, back = checkpoint_of(run), readable(lambda: checkpoint_folder.steps_back(run.checkpoints)) or ()
    return {
        "id": run.id,
        "name": run.name,
        "state": state,
        "step": last.get("step", 0),
        "loss": last.get("loss"),
        "slowest_stage": last.get("slowest_stage"),
        "slowest_rank": last.get("slowest_rank"),
        "time": status.get("time"),
        "message": status.get("message") or why,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "steps_back": ", ".join(f"{s.bad} to {s.step} (without samples {s.first} to {s.end - 1})" for s in back)
        or None,
        "starts": " | ".join(lives(run)[-5:]) or None,
        "command": next(reversed(readable(run.commands) or []), None),
        "path": str(run.path),
    }


def lives(run: RunDir) -> list[str]:
    """A text for each start that agents began after the run's first: after which step, where, why, and its phases."""

    def text(one: dict[str, Any]) -> str:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in one.get("start_up", {}).items())
        text_of_start = f"start after step {one['step']} on {', '.join(one['nodes'])}: {one['why']}"
        return f"{text_of_start} ({phases})" if phases else text_of_start

    return [text(one) for one in run.environment().get("starts", ())[1:]]


def readable(read: Callable[[], T]) -> T | None:
    """The result of `read`; None if it cannot be read, with a warning."""
    try:
        return read()
    except PpctlError as error:
        warn(error.problems[0])
        return None


def checkpoint_of(run: RunDir) -> Path | None:
    """The checkpoint that a start would go on from; None also if the directory cannot be read."""
    newest = readable(lambda: checkpoint_folder.find(run.checkpoints))
    return None if newest is None else newest.path


def _state(run: RunDir, status: dict[str, Any]) -> tuple[str, str | None]:
    """(the state in status.json, or `lost` if no process runs the run; why, if its process is known to be gone)."""
    state = str(status["state"])
    if state not in STARTED or is_held(run):
        return state, None
    if is_gone(last := holder(run)):
        return LOST, f"its process ({last['pid']} on {last['machine']}) and its ranks no longer exist"
    return LOST if quiet_for(run) > QUIET else state, None
