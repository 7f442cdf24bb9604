"""`ppctl logs [RUN]`: what a run has printed: the job's log, its steps where it had a terminal, or one rank's log.

Knows where logs lie. Must not know what they say.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from ppctl.cli import jobs
from ppctl.cli.console import note
from ppctl.errors import ConfigError, Problem
from ppctl.rundir import RunDir
from ppctl.step_lines import WIDE, StepLines

_LIVES = ("queued", "starting", "running")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    jobs.add_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="that rank's own log: warnings and tracebacks")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="the last N lines only")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the run has ended")


def run(args: argparse.Namespace) -> int:
    """Print a log."""
    one = jobs.meant(args)
    if args.rank is None and not one.job():
        steps = _Steps(one)
        _follow(one, steps.more, args.lines, follow=args.follow)
        said = one.status().get("message") or ("" if steps.any else f"run {one.id} has done no step")
        if said:
            note(said)
        return 0
    path = one.job_log if args.rank is None else one.log(args.rank)
    if not path.exists() and not (args.follow and _lives(one)):
        there = ", ".join(sorted(file.name for file in path.parent.glob("*.log"))) or "none"
        message = f"there is no {path.name} in {path.parent} (yet); there are: {there}"
        raise ConfigError(Problem("PP-E611", message, f"ppctl status {one.path}", str(one.path)))
    if path.exists() and not path.stat().st_size and not args.follow:
        note(f"{path} is empty: the rank has said nothing")
    _follow(one, _Text(path).more, args.lines, follow=args.follow)
    return 0


class _Text:
    """A log file, read on from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def more(self) -> str:
        """What has been added."""
        if not self._path.exists():
            return ""
        with open(self._path, encoding="utf-8", errors="replace") as file:
            file.seek(self._at)
            text = file.read()
            self._at = file.tell()
        return text


class _Steps:
    """The steps of a run that printed on its own terminal, as it printed them."""

    def __init__(self, one: RunDir) -> None:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else WIDE
        self._run = one
        self._lines = StepLines(one.read_config().train.steps, width)
        self._last = 0

    @property
    def any(self) -> bool:
        """Whether there has been one."""
        return self._last > 0

    def more(self) -> str:
        """The lines of the steps that have been added."""
        records = [record for record in self._run.metrics() if record["step"] > self._last]
        self._last = records[-1]["step"] if records else self._last
        return "".join(f"{line}\n" for record in records for line in self._lines.lines(record))


def _lives(one: RunDir) -> bool:
    return one.status()["state"] in _LIVES


def _follow(one: RunDir, more: Callable[[], str], lines: int | None, *, follow: bool) -> None:
    """Print what there is (its last `lines`), and with `follow` what is added until the run has ended."""
    while True:
        goes_on = follow and _lives(one)  # asked first, so that what was written last is still shown
        text = more()
        if lines is not None:
            text, lines = "".join(text.splitlines(keepends=True)[-lines:] if lines else []), None
        sys.stdout.write(text)
        sys.stdout.flush()
        if not goes_on:
            return
        time.sleep(0.5)
