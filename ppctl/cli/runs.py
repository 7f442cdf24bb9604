"""`ppctl runs`: the runs under a directory, newest first; `ppctl runs show RUN`: one; `--compare A B`: two of them."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ppctl.cli.console import UNFOLDED, aligned, fits, folded, width
from ppctl.errors import ConfigError, PpctlError, Problem, pasted
from ppctl.host.processes import is_gone
from ppctl.runs import checkpoint_folder
from ppctl.runs.finding import find_run, list_runs
from ppctl.runs.run_starts import QUIET, holder, is_held, quiet_for
from ppctl.runs.rundir import RunDir, warn

RUNS = Path("runs")
"""The directory of all runs, if no other is named."""
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
        chosen = named_run(args)
        best = checkpoint_folder.best(checkpoint_folder.complete(chosen.checkpoints))[:1]
        one = facts(chosen) | {"best": str(best[0]) if best else None}
        print(json.dumps(one, indent=1) if args.json else _shown(one))
        return 0
    if args.run is not None:
        message = f"{args.run}: `ppctl runs list` does not take a run"
        raise ConfigError(Problem("PP-E105", message, f"ppctl runs show {pasted(args.run)}"))
    listed = [facts(each) for each in list_runs(args.dir)]
    if args.json:
        print(json.dumps(listed, indent=1))
    else:
        print(table(listed) if listed else f"no runs under {args.dir}")
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
    first, second = (find_run(name, args.dir) for name in args.compare)
    compared = comparison((first, second))
    print(json.dumps(compared, indent=1) if args.json else _comparison_text(compared, width(UNFOLDED)))
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
    """The result of `read`; None if it cannot be read, with a warning."""
    try:
        return read()
    except PpctlError as error:
        warn(error.problems[0])
        return None


def checkpoint_of(run: RunDir) -> Path | None:
    """The checkpoint that a start would go on from; None even if the directory cannot be read."""
    newest = readable(lambda: checkpoint_folder.find(run.checkpoints))
    return None if newest is None else newest.path


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


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as a table; on a narrow terminal the time of day without seconds, or without its year."""
    columns = width(UNFOLDED)
    tables = [_table(runs, form) for form in _TIMES]
    return next((each for each in tables if fits(each, columns)), tables[-1])


def _table(runs: list[dict[str, Any]], time_form: str) -> str:
    rows = [("id", "name", "state", "step", "loss", "when")]
    for one in runs:
        loss = "" if one["loss"] is None else f"{one['loss']:.4f}"
        when = time.strftime(time_form, time.localtime(one["time"])) if one["time"] else ""
        rows.append((one["id"], one["name"], one["state"], str(one["step"]), loss, when))
    return aligned(rows)


# --compare: the keys in which two runs differ, and their losses and speeds side by side


_MOST_STEPS_SHOWN = 12


def comparison(runs: tuple[RunDir, RunDir]) -> dict[str, Any]:
    """The differences of two runs: `keys` (key -> both values), and `steps` that both have done.

    `tokens_per_s` is each run's median. Raises ConfigError (PP-E611) if a config cannot be read.
    """
    from statistics import median  # fractions and decimals

    from ppctl.config.keys import text_keys  # ppctl.config, which lists of runs do not need

    configs = [run.read_config() for run in runs]
    values = {name: [config[name] for config in configs] for name in text_keys()}
    metrics = [{record["step"]: record for record in run.metrics()} for run in runs]
    both = sorted(metrics[0].keys() & metrics[1].keys())
    shown = ("loss", "tokens_per_s")
    speeds = [[r["tokens_per_s"] for r in records.values() if r.get("tokens_per_s")] for records in metrics]
    return {
        "runs": [str(run.path) for run in runs],
        "ids": [run.id for run in runs],
        "done": [max(records, default=0) for records in metrics],
        "keys": {name: pair for name, pair in values.items() if pair[0] != pair[1]},
        "tokens_per_s": [median(speed) if speed else None for speed in speeds],
        "steps": [{"step": n, **{key: [of[n].get(key) for of in metrics] for key in shown}} for n in both],
    }


def _comparison_text(compared: dict[str, Any], columns: int) -> str:
    """Keys that differ, then a dozen steps from the first common one to the last, in at most `columns` columns."""
    named = aligned(zip("AB", compared["ids"], strict=True))
    lines = [named, "", _keys(compared["keys"], columns) if compared["keys"] else "no key differs", ""]
    steps = compared["steps"]
    if steps:
        last = len(steps) - 1
        chosen = (
            sorted({round(n * last / (_MOST_STEPS_SHOWN - 1)) for n in range(_MOST_STEPS_SHOWN)})
            if last >= _MOST_STEPS_SHOWN
            else range(last + 1)
        )
        heads = ("step", "loss A", "loss B", "difference", "tokens/s A", "tokens/s B")
        lines.append(aligned([heads, *(_row(steps[n]) for n in chosen)], 6))
    else:
        lines.append("no step was done by both")
    first, second = compared["tokens_per_s"]
    speeds = [f"{name} {'-' if speed is None else f'{speed:,.0f}'}" for name, speed in (("A", first), ("B", second))]
    faster = f" ({second / first - 1:+.1%})" if first and second else ""
    return "\n".join([*lines, "", f"tokens/s, median: {', '.join(speeds)}{faster}"])


def _keys(keys: dict[str, Any], columns: int) -> str:
    """The keys that differ, with both values; values that are too long for the table, as paths are, stand below it."""
    from ppctl.config.keys import value_text

    room = (columns - max(map(len, keys)) - 4) // 2
    rows = [(name, *map(value_text, pair)) for name, pair in keys.items()]
    short = [row for row in rows if max(map(len, row[1:])) <= room]
    below = [f"{name}\n  A  {a}\n  B  {b}" for name, a, b in rows if max(len(a), len(b)) > room]
    return "\n".join([aligned([("key", *"AB"), *short]) if short else "key", *below])


def _row(step: dict[str, Any]) -> tuple[str, ...]:
    first, second = step["loss"]
    apart = "" if None in (first, second) else f"{second - first:+.2e}" if second != first else "equal"
    losses = ["" if loss is None else f"{loss:.6f}" for loss in (first, second)]
    speeds = ["" if speed is None else f"{speed:,.0f}" for speed in step["tokens_per_s"]]
    return (str(step["step"]), *losses, apart, *speeds)
