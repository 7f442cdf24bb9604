"""`ppctl runs`: the runs under a directory, newest first; `ppctl runs show RUN`: one; `--compare A B`: two of them.

Knows how a command line names a run, and the facts of a run that several commands show. Must not change any run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ppctl import checkpoint_folder
from ppctl.cli.console import UNFOLDED, width
from ppctl.cli.table import aligned, fits, folded
from ppctl.errors import ConfigError, PpctlError, Problem, pasted
from ppctl.processes import is_gone
from ppctl.run_starts import QUIET, holder, is_held, quiet_for
from ppctl.rundir import RunDir, warn
from ppctl.runs import find_run, list_runs

RUNS = Path("runs")
"""The directory of all runs, where no other is named."""
T = TypeVar("T")
STARTED = ("starting", "running")
"""States of status.json in which a run has processes."""
_TIMES = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%m-%d %H:%M")
LOST = "lost"
"""The state of a run that has started by its status.json, and has no process any more."""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare RUN and --dir, which `named_run` reads."""
    words = "the run's directory, id, a unique prefix of the id, or SLURM job (default: the newest run)"
    parser.add_argument("run", nargs="?", metavar="RUN", help=words)
    add_runs_directory(parser)


def add_runs_directory(parser: argparse.ArgumentParser) -> None:
    """Declare --dir."""
    words = "the directory with all runs (default: runs)"
    parser.add_argument("--dir", type=Path, default=RUNS, metavar="DIR", help=words)


def named_run(args: argparse.Namespace) -> RunDir:
    """The run that RUN and --dir name. Raises ConfigError if there is none, or more than one."""
    return find_run(args.run, args.dir)


def program() -> str:
    """How to call ppctl here: by its name if it is on the PATH, else by its path."""
    if shutil.which("ppctl"):
        return "ppctl"
    script = Path(sys.executable).with_name("ppctl")
    return pasted(short_path(script)) if script.exists() else f"{pasted(sys.executable)} -m ppctl"


def short_path(path: Path) -> str:
    """A path, relative to the working directory if it is below it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "list all runs (the default), or show one"
    parser.add_argument("action", nargs="?", choices=("list", "show"), default="list", help=words)
    add_run_arguments(parser)
    words = "compare two runs: keys that differ, losses and speeds side by side"
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help=words)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List runs, show one, or compare two."""
    if args.compare:
        return _compare(args)
    if args.action == "show":
        one = facts(named_run(args))
        print(json.dumps(one, indent=1) if args.json else _shown(one))
        return 0
    if args.run is not None:
        message = f"{args.run}: `ppctl runs list` does not take a run"
        raise ConfigError(Problem("PP-E105", message, f"ppctl runs show {pasted(args.run)}"))
    found = [facts(each) for each in list_runs(args.dir)]
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(table(found) if found else f"no runs under {args.dir}")
    return 0


def _shown(one: dict[str, Any]) -> str:
    """A fact a line, folded between words, but for the command, which is to be pasted."""
    rows = {key: str(value) for key, value in one.items() if value is not None and key != "time"}
    name = max(map(len, one))
    columns = width(UNFOLDED)
    lines = {key: folded([(f"{key:<{name}}", value)], columns, " ") for key, value in rows.items()}
    if "command" in rows:
        lines["command"] = [[f"{'command':<{name}}", rows["command"]]]
    return "\n".join(map(aligned, lines.values()))


def _compare(args: argparse.Namespace) -> int:
    from ppctl.cli import compare_runs  # imports ppctl.config, which lists of runs do not need

    first, second = (find_run(name, args.dir) for name in args.compare)
    found = compare_runs.comparison((first, second))
    print(json.dumps(found, indent=1) if args.json else compare_runs.text(found, width(UNFOLDED)))
    return 0


def facts(run: RunDir) -> dict[str, Any]:
    """The facts of a run that can be read without its plan."""
    status, metrics = run.status(), run.metrics_file(last=1).read()
    state = _state(run, status)
    last = metrics[-1] if metrics else {}
    checkpoint = checkpoint_of(run)
    return {
        "id": run.id,
        "name": run.name,
        "state": state,
        "step": last.get("step", 0),
        "loss": last.get("loss"),
        "slowest_stage": last.get("slowest_stage"),
        "slowest_rank": last.get("slowest_rank"),
        "time": status.get("time"),
        "message": status.get("message") or _why_lost(run, state),
        "checkpoint": str(checkpoint) if checkpoint else None,
        "command": next(reversed(readable(run.commands) or []), None),
        "path": str(run.path),
    }


def readable(read: Callable[[], T]) -> T | None:
    """The result of `read`; None where it cannot be read, with a warning."""
    try:
        return read()
    except PpctlError as error:
        warn(error.problems[0])
        return None


def checkpoint_of(run: RunDir) -> Path | None:
    """The checkpoint that a start would go on from; None also if the directory cannot be read."""
    found = readable(lambda: checkpoint_folder.find(run.checkpoints))
    return None if found is None else found.path


def _state(run: RunDir, status: dict[str, Any]) -> str:
    """The state in status.json, or `lost` if no process runs it: at once if its process is known."""
    state = str(status["state"])
    if state not in STARTED or is_held(run):
        return state
    if is_gone(holder(run)):
        return LOST
    return LOST if quiet_for(run) > QUIET else state


def _why_lost(run: RunDir, state: str) -> str | None:
    last = holder(run)
    if state != LOST or not is_gone(last):
        return None
    return f"its process ({last['pid']} on {last['machine']}) and its ranks no longer exist"


def table(found: list[dict[str, Any]]) -> str:
    """The runs as a table; on a narrow terminal the time of day without seconds, or without its year."""
    columns = width(UNFOLDED)
    tables = [_table(found, form) for form in _TIMES]
    return next((each for each in tables if fits(each, columns)), tables[-1])


def _table(found: list[dict[str, Any]], time_form: str) -> str:
    rows = [("id", "name", "state", "step", "loss", "when")]
    for one in found:
        loss = "" if one["loss"] is None else f"{one['loss']:.4f}"
        when = time.strftime(time_form, time.localtime(one["time"])) if one["time"] else ""
        rows.append((one["id"], one["name"], one["state"], str(one["step"]), loss, when))
    return aligned(rows)
