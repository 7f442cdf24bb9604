"""`ppctl logs [RUN]`: what a run has printed: the job's log, or one rank's.

Knows where logs lie. Must not know what they say.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from ppctl.cli.jobs import add_run, meant
from ppctl.errors import ConfigError, Problem
from ppctl.rundir import RunDir

_LIVES = ("queued", "starting", "running")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="that rank's own log: warnings and tracebacks")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="the last N lines only")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")


def run(args: argparse.Namespace) -> int:
    """Print a log."""
    one = meant(args)
    path = one.job_log if args.rank is None and one.job() else one.log(args.rank or 0)
    if not path.exists() and not (args.follow and one.status()["state"] in _LIVES):
        there = ", ".join(sorted(file.name for file in path.parent.glob("*.log"))) or "none"
        message = f"there is no {path.name} in {path.parent} (yet); there are: {there}"
        raise ConfigError(Problem("PP-E611", message, f"ppctl status {one.path}", str(one.path)))
    _print(path, one, args.lines, follow=args.follow)
    return 0


def _print(path: Path, one: RunDir, lines: int | None, *, follow: bool) -> None:
    at = 0
    while True:
        lives = one.status()["state"] in _LIVES  # asked first, so that what was written last is still shown
        if path.exists():
            with open(path, encoding="utf-8", errors="replace") as file:
                file.seek(at)
                text = file.read()
                at = file.tell()
            if lines is not None:
                text, lines = "".join(text.splitlines(keepends=True)[-lines:] if lines else []), None
            sys.stdout.write(text)
            sys.stdout.flush()
        if not (follow and lives):
            return
        time.sleep(0.5)
