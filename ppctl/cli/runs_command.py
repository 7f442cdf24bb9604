"""`ppctl runs`: lists runs with what sets them apart, shows one, compares several, deletes some."""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppctl.cli.comparison import comparison, comparison_page, comparison_text, labels
from ppctl.cli.console import UNFOLDED, aligned, fits, folded, note, width
from ppctl.cli.jobs import state_of
from ppctl.cli.runs import RUNS, STARTED, add_run_arguments, facts, named_run, readable, short_path
from ppctl.cli.timeline import obstacle
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import read_whole, write_atomically
from ppctl.runs import checkpoint_folder
from ppctl.runs.finding import find_runs, list_runs
from ppctl.runs.run_starts import at_rest
from ppctl.runs.rundir import RunDir

_WRITTEN_BY_A_START = ("config.yaml", "plan.json", "command.txt", "status.json")
"""Files that every run has: a directory without them may be anything."""
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
        return _delete(find_runs(references, args.dir), args)
    if args.more or (action == "list" and references):
        message = f"{references[-1]}: `ppctl runs {action}` does not take {'several runs' if args.more else 'a run'}"
        remedy = f"ppctl runs {'compare' if args.more else 'show'} {pasted(*references)}"
        raise ConfigError(Problem("PP-E105", message, remedy))
    if action == "show":
        chosen = named_run(args)
        best = checkpoint_folder.best(readable(lambda: checkpoint_folder.usable(chosen.checkpoints)) or ())[:1]
        one = facts(chosen) | {"best": str(best[0]) if best else None, "replay": chosen.environment().get("replay")}
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
    """For each run the words that set it apart from other runs of the same name."""
    of_name: dict[str, list[RunDir]] = {}
    for run in runs:
        of_name.setdefault(run.name, []).append(run)
    found: dict[Path, str] = {}
    for same in of_name.values():
        texts = [_flat(run) for run in same] if len(same) > 1 else [{}]
        found |= dict(zip((run.path for run in same), labels(texts), strict=True))
    return [found[run.path] for run in runs]


def _flat(run: RunDir) -> dict[str, str]:
    """Key -> its text in config.yaml, read line by line: parsing hundreds of files would take seconds."""
    values, section = {}, ""
    with suppress(OSError, UnicodeDecodeError):
        text = read_whole(run.path / "config.yaml", follow=False).decode()
        for top, name, value in re.findall(r"^(?:(\w+):|  (\w+): (.*))", text, re.MULTILINE):
            section = top or section
            values[f"{section}.{name}"] = value
    return values


def _shown(one: dict[str, Any]) -> str:
    """One fact per line, wrapped between words except for the command, which a user may paste."""
    rows = {key: str(value) for key, value in one.items() if value is not None and key != "time"}
    name = max(map(len, one))
    columns = width(UNFOLDED)
    lines = {key: folded([(f"{key:<{name}}", value)], columns, " ") for key, value in rows.items()}
    if "command" in rows:
        lines["command"] = [[f"{'command':<{name}}", rows["command"]]]
    return "\n".join(map(aligned, lines.values()))


def _compare(runs: Sequence[RunDir], args: argparse.Namespace) -> int:
    if len(runs) < 2:
        message = f"two or more runs are compared, but {len(runs)} {'is' if runs else 'are'} named"
        every, where = list_runs(args.dir), ["--dir", str(args.dir)] * (args.dir != RUNS)
        ways = [["compare", "*"]] if len(every) > 1 and "*" not in args.typed else []
        ways += [
            ["show", run.id if run.path.parent.parent == Path(args.dir).absolute() else str(run.path)]
            for run in runs or every[:1]
        ]
        raise ConfigError(
            Problem("PP-E105", message, "\n".join(pasted("ppctl", "runs", *way, *where) for way in ways or [[]]))
        )
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
    """The runs as a table. A narrow terminal gets times without seconds or year, or no column `differs`."""
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


def _delete(runs: Sequence[RunDir], args: argparse.Namespace) -> int:
    """Delete `runs` after asking; returns 1 if the answer is no. Raises ConfigError with the problems of all runs.

    A run disappears by one rename, and its files are then removed; the next `delete` removes what an interruption left.
    """
    remains = [path for path in args.dir.absolute().glob("*/.*.deleted") if _is_own(path)]
    states = [state_of(run) for run in runs]
    if problems := [problem for run, state in zip(runs, states, strict=True) for problem in _problems(run, state)]:
        raise ConfigError(problems)
    if not runs and not remains:
        raise ConfigError(Problem("PP-E105", "`ppctl runs delete` takes runs, but none is named", "ppctl runs"))
    sizes = [_bytes_of(run.path) for run in runs]
    what = f"{len(runs)} run{'s' * (len(runs) != 1)}, {sum(sizes):,} bytes"
    if runs and not args.yes:
        for run, state, size in zip(runs, states, sizes, strict=True):
            note(f"{short_path(run.path)}: {state}, {size:,} bytes")
        if not sys.stdin.isatty():
            message = f"nobody is there to ask whether to delete {what}"
            raise ConfigError(Problem("PP-E651", message, pasted("ppctl", *args.typed, "--yes"), "stdin"))
        print(f"delete {what}? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("nothing was deleted")
            return 1
    for run in runs:
        with at_rest(run):
            remains.append(run.path.rename(run.path.with_name(f".{run.id}.{secrets.token_hex(4)}.deleted")))
    try:
        for path in remains:
            shutil.rmtree(path)
    except KeyboardInterrupt:
        note("interrupted: the runs are gone, and `ppctl runs delete` removes what is left of their files")
        raise
    done = {"deleted": [str(run.path) for run in runs], "bytes": sum(sizes)}
    print(json.dumps(done) if args.json else f"deleted {what}")
    return 0


def _problems(run: RunDir, state: str) -> Iterator[Problem]:
    where = pasted(short_path(run.path))
    missing = [name for name in _WRITTEN_BY_A_START if not (run.path / name).is_file()]
    if missing or not _is_own(run.path):
        why = f"it has no {missing[0]}" if missing else "it is a link, or another user's"
        yield Problem("PP-E651", f"{run.path} is not deleted: {why}", f"ls -lad {where}", str(run.path))
    elif state in ("queued", *STARTED) and (state != "queued" or run.job()):
        remedy = f"ppctl cancel {where}" if run.job() else f"ppctl status {where}"
        yield Problem("PP-E613", f"run {run.id} is {state}, so it is not deleted", remedy, str(run.path))


def _is_own(path: Path) -> bool:
    return path.lstat().st_uid == os.geteuid() and not path.is_symlink()


def _bytes_of(directory: Path) -> int:
    """Bytes of all files below a directory; a file with several links counts once."""
    files = [os.lstat(os.path.join(place, name)) for place, _, names in os.walk(directory) for name in names]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())
