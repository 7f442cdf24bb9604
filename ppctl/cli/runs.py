"""`ppctl runs`: the runs under a directory, newest first; `ppctl runs show RUN`: one of them.

Knows what a person wants to see of a run. Must not change any.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from ppctl import checkpoint_folder
from ppctl.cli.table import aligned
from ppctl.errors import CheckpointError, ConfigError, Problem
from ppctl.processes import is_gone
from ppctl.run_starts import holder, is_held
from ppctl.rundir import RunDir
from ppctl.runs import find_run, list_runs

LOST = "lost"
"""What a run is whose status.json says that it lives, and nobody runs it."""
_LIVES = ("starting", "running")
_QUIET = 60.0
"""Seconds without any writing after which a run that nobody holds counts as lost: heartbeats come every ten."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("action", nargs="?", choices=("list", "show"), default="list")
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="directory, id, unique prefix or SLURM job; default: newest"
    )
    parser.add_argument("--dir", default="runs", metavar="DIR", help="where runs are looked for (default: runs)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """List runs, or show one."""
    root = Path(args.dir)
    if args.action == "show":
        one = facts(find_run(args.run, root))
        print(json.dumps(one, indent=1) if args.json else "\n".join(_lines(one)))
        return 0
    if args.run is not None:
        message = f"{args.run}: `ppctl runs list` takes no run"
        raise ConfigError(Problem("PP-E105", message, f"ppctl runs show {args.run}"))
    found = [facts(each) for each in list_runs(root)]
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        print(table(found) if found else f"no runs under {root}")
    return 0


def facts(run: RunDir) -> dict[str, Any]:
    """What is known of a run without reading its plan."""
    status, metrics = run.status(), run.metrics()
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
        "command": run.commands()[-1],
        "path": str(run.path),
    }


def checkpoint_of(run: RunDir) -> Path | None:
    """The checkpoint that a start would go on from, to be shown: None also where the directory cannot be read."""
    try:
        found = checkpoint_folder.find(run.checkpoints)
    except CheckpointError:
        return None
    return None if found is None else found.path


def _state(run: RunDir, status: dict[str, Any]) -> str:
    """As status.json says, but `lost` where nobody runs it: at once where its process is known."""
    state = str(status["state"])
    if state not in _LIVES or is_held(run):
        return state
    if is_gone(holder(run)):
        return LOST
    files = [run.path, *run.path.glob("*.json*"), *(run.path / "heartbeats").glob("*.json")]
    return LOST if time.time() - max(file.stat().st_mtime for file in files) > _QUIET else state


def _why_lost(run: RunDir, state: str) -> str | None:
    last = holder(run)
    if state != LOST or not is_gone(last):
        return None
    return f"the process that ran it ({last['pid']} on {last['machine']}) is gone, and its ranks with it"


def table(found: list[dict[str, Any]]) -> str:
    """The runs in columns."""
    rows = [("id", "name", "state", "step", "loss", "when")]
    for one in found:
        loss = "" if one["loss"] is None else f"{one['loss']:.4f}"
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one["time"])) if one["time"] else ""
        rows.append((one["id"], one["name"], one["state"], str(one["step"]), loss, when))
    return aligned(rows)


def _lines(one: dict[str, Any]) -> list[str]:
    return [f"{key:<11} {value}" for key, value in one.items() if value is not None and key != "time"]
