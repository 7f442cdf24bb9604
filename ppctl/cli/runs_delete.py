"""`ppctl runs delete RUN...`: asks, and removes whole runs that nothing continues."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ppctl.cli.console import note
from ppctl.cli.jobs import state_of
from ppctl.cli.runs import STARTED, short_path
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.runs.run_starts import at_rest
from ppctl.runs.rundir import RunDir

_WRITTEN_BY_A_START = ("config.yaml", "plan.json", "command.txt", "status.json")
"""Files that every run has: a directory without them may be anything."""


def delete(runs: Sequence[RunDir], args: argparse.Namespace) -> int:
    """Delete `runs` after asking; returns 1 if the answer is no. Raises ConfigError with the problems of all runs.

    A run disappears by one rename, and is then removed: what an interruption leaves, the next `delete` removes.
    """
    remains = [path for path in args.dir.absolute().glob("*/.*.deleted") if _is_own(path)]
    states = [state_of(run) for run in runs]
    if problems := [problem for run, state in zip(runs, states, strict=True) for problem in _problems(run, state)]:
        raise ConfigError(problems)
    if not runs and not remains:
        raise ConfigError(Problem("PP-E105", "`ppctl runs delete` takes runs, and none is named", "ppctl runs"))
    sizes = [_bytes_of(run.path) for run in runs]
    what = f"{len(runs)} run{'s' * (len(runs) != 1)}, {sum(sizes):,} bytes"
    if runs and not args.yes:
        for run, state, size in zip(runs, states, sizes, strict=True):
            note(f"{short_path(run.path)}: {state}, {size:,} bytes")
        if not sys.stdin.isatty():
            message = f"nobody is there who could be asked whether to delete {what}"
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
        yield Problem("PP-E613", f"run {run.id} is {state}, and is not deleted", remedy, str(run.path))


def _is_own(path: Path) -> bool:
    return path.lstat().st_uid == os.geteuid() and not path.is_symlink()


def _bytes_of(directory: Path) -> int:
    """Bytes of all files below a directory, those with several names once."""
    files = [os.lstat(os.path.join(place, name)) for place, _, names in os.walk(directory) for name in names]
    return sum({(file.st_dev, file.st_ino): file.st_size for file in files}.values())
