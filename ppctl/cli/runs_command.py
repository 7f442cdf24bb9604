"""`ppctl runs`: lists runs with what sets them apart, shows one, compares several, deletes some."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppctl.cli.comparison import comparison, comparison_page, comparison_text, labels
from ppctl.cli.console import UNFOLDED, aligned, fits, folded, note, width
from ppctl.cli.runs import add_run_arguments, facts, named_run
from ppctl.cli.runs_delete import delete
from ppctl.cli.timeline import obstacle
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import read_whole, write_atomically
from ppctl.runs import checkpoint_folder
from ppctl.runs.finding import find_runs, list_runs
from ppctl.runs.rundir import RunDir

_TIMES = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%m-%d %H:%M")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    words = "list all runs (the default), show one, compare several (two step by step: ppctl parity), or delete them"
    parser.add_argument("action", nargs="?", choices=("list", "show", "compare", "delete"), default="list", help=words)
    add_run_arguments(parser)
    parser.add_argument("more", nargs="*", metavar="RUN", help="compare, delete: more runs, names, or patterns of ids")
    parser.add_argument("--compare", nargs=2, metavar=("A", "B"), help="`ppctl runs compare A B`")
    parser.add_argument("--html", type=Path, metavar="FILE", help="compare: write the curves as one page")
    parser.add_argument("--yes", action="store_true", help="delete: do not ask")
    parser.add_argument("--json", action="store_true", help="print JSON")


INTERMIXED = True


def run(args: argparse.Namespace) -> int:
    """List runs, show one, compare or delete several."""
    references, action = args.compare or [*filter(None, [args.run]), *args.more], args.action
    action = "compare" if args.compare else action
    for flag, given, its in (("--html", args.html, "compare"), ("--yes", args.yes, "delete")):
        if given and action != its:
            raise ConfigError(Problem("PP-E105", f"{flag} belongs to `ppctl runs {its}`", f"ppctl runs {its} --help"))
    if action == "compare":
        return _compare(find_runs(references, args.dir, args.typed), args)
    if action == "delete":
        return delete(find_runs(references, args.dir), args)
    if args.more or (action == "list" and references):
        message = f"{references[-1]}: `ppctl runs {action}` does not take {'several runs' if args.more else 'a run'}"
        remedy = f"ppctl runs {'compare' if args.more else 'show'} {pasted(*references)}"
        raise ConfigError(Problem("PP-E105", message, remedy))
    if action == "show":
        chosen = named_run(args)
        best = checkpoint_folder.best(checkpoint_folder.complete(chosen.checkpoints))[:1]
        one = facts(chosen) | {"best": str(best[0]) if best else None}
        print(json.dumps(one, indent=1) if args.json else _shown(one))
        return 0
    runs = list_runs(args.dir)
    listed = [facts(each) | {"differs": words} for each, words in zip(runs, _labels(runs), strict=True)]
    if args.json:
        print(json.dumps(listed, indent=1))
    else:
        print(table(listed) if listed else f"no runs under {args.dir}")
    return 0


def _labels(runs: Sequence[RunDir]) -> list[str]:
    """For each run the words that set it apart from the others of its name."""
    of_name: dict[str, list[RunDir]] = {}
    for run in runs:
        of_name.setdefault(run.name, []).append(run)
    found: dict[Path, str] = {}
    for same in of_name.values():
        texts = [_flat(run) for run in same] if len(same) > 1 else [{}]
        found |= dict(zip((run.path for run in same), labels(texts), strict=True))
    return [found[run.path] for run in runs]


def _flat(run: RunDir) -> dict[str, str]:
    """Key -> its text in config.yaml, as ppctl writes that file: to parse hundreds of files would take seconds."""
    values, section = {}, ""
    with suppress(OSError, UnicodeDecodeError):
        text = read_whole(run.path / "config.yaml", follow=False).decode()
        for top, name, value in re.findall(r"^(?:(\w+):|  (\w+): (.*))", text, re.MULTILINE):
            section = top or section
            values[f"{section}.{name}"] = value
    return values


def _shown(one: dict[str, Any]) -> str:
    """A fact a line, folded between words, but for the command, which is to be pasted."""
    texts = {key: " | ".join(value) if isinstance(value, list) else value for key, value in one.items()}
    rows = {key: str(value) for key, value in texts.items() if value not in (None, "") and key != "time"}
    name = max(map(len, one))
    columns = width(UNFOLDED)
    lines = {key: folded([(f"{key:<{name}}", value)], columns, " ") for key, value in rows.items()}
    if "command" in rows:
        lines["command"] = [[f"{'command':<{name}}", rows["command"]]]
    return "\n".join(map(aligned, lines.values()))


def _compare(runs: Sequence[RunDir], args: argparse.Namespace) -> int:
    if len(runs) < 2:
        message = f"two or more runs are compared, and {len(runs)} {'is' if runs else 'are'} named"
        raise ConfigError(Problem("PP-E105", message, "ppctl runs compare '*'"))
    if args.html is not None and (reason := obstacle(args.html)):
        message = f"the page cannot be written to {args.html}: {reason}"
        raise ConfigError(Problem("PP-E129", message, "--html runs.html", "command line"))
    compared, records = comparison(runs)
    print(json.dumps(compared, indent=1) if args.json else comparison_text(compared, records, width(UNFOLDED)))
    if args.html is not None:
        write_atomically(args.html, comparison_page(compared, records))
        note(f"note: wrote {args.html}")
    return 0


def table(runs: list[dict[str, Any]]) -> str:
    """The runs as a table; on a narrow terminal the time of day without seconds, or without its year, and in the end
    without what sets runs apart."""
    columns = width(UNFOLDED)
    differ = [True, False] if any(one["differs"] for one in runs) else [False]
    tables = [_table(runs, form, columns, differs) for differs in differ for form in _TIMES]
    return next((each for each in tables if fits(each, columns)), tables[-1])


def _table(runs: list[dict[str, Any]], time_form: str, columns: int, differs: bool) -> str:
    rows = [("id", "name", "state", "step", "loss", "when", *["differs"] * differs)]
    for one in runs:
        loss = "" if one["loss"] is None else f"{one['loss']:.4f}"
        when = time.strftime(time_form, time.localtime(one["time"])) if one["time"] else ""
        row = (one["id"], one["name"], one["state"], str(one["step"]), loss, when)
        rows.append((*row, *[one["differs"]] * differs))
    return aligned(folded(rows, columns, " ") if differs else rows)
