"""`ppctl logs [RUN]`: the output of a run: its steps, its job's log if it was submitted, or one rank's log.

Knows where logs are. Must not know what is in them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from io import TextIOWrapper
from pathlib import Path

from ppctl.cli.console import note, width
from ppctl.cli.runs import STARTED, add_run_arguments, named_run
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import open_regular
from ppctl.records.step_lines import WIDE, StepLines
from ppctl.runs.rundir import RunDir, odd


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="print the log of rank N: warnings and tracebacks")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="print only the last N lines")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run has ended")


def run(args: argparse.Namespace) -> int:
    """Print a log."""
    run_dir = named_run(args)
    if args.rank is None and not run_dir.job():
        steps = _Steps(run_dir, args.lines)
        _follow(run_dir, steps.read, args.lines, follow=args.follow)
        message = run_dir.status().get("message") or ("" if steps.last else f"run {run_dir.id} has done no step")
        if message:
            note(message)
        return 0
    path = run_dir.job_log if args.rank is None else run_dir.log(args.rank)
    if not path.exists() and not (args.follow and _is_going_on(run_dir)):
        there = ", ".join(sorted(file.name for file in path.parent.glob("*.log"))) or "none"
        message = f"there is no {path.name} in {path.parent} (yet); there are: {there}"
        raise ConfigError(Problem("PP-E611", message, f"ppctl status {pasted(run_dir.path)}", str(run_dir.path)))
    if path.exists() and not path.stat().st_size and not args.follow:
        note(f"{path} is empty: the rank has printed nothing")
    _follow(run_dir, _LogFile(path).read, args.lines, follow=args.follow)
    return 0


class _LogFile:
    """A log file of which each read returns what has been added."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0

    def read(self) -> str:
        """The text that has been added since the last read."""
        try:
            opened = open_regular(self._path, follow=False)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise ConfigError(odd(self._path, error.strerror)) from error
        with TextIOWrapper(opened, "utf-8", "replace") as file:
            file.seek(self._at)
            text, self._at = file.read(), file.tell()
        return text


class _Steps:
    """The steps of a run that was not submitted, as it printed them on its terminal."""

    def __init__(self, run_dir: RunDir, lines: int | None) -> None:
        """At first with the last `lines` at least; None: with all."""
        self._metrics = run_dir.metrics_file(last=lines)
        self._lines = StepLines(run_dir.read_config().train.steps, width(WIDE))
        self.last = 0
        """The last step that was read; 0 before the first."""

    def read(self) -> str:
        """The lines of the steps that have been added since the last read."""
        records = [record for record in self._metrics.read() if record["step"] > self.last]
        self.last = records[-1]["step"] if records else self.last
        return "".join(f"{line}\n" for record in records for line in self._lines.lines(record))


def _is_going_on(run_dir: RunDir) -> bool:
    return run_dir.status()["state"] in ("queued", *STARTED)


def _follow(run_dir: RunDir, read: Callable[[], str], lines: int | None, *, follow: bool) -> None:
    """Print the last `lines` (None: all) of what there is, and with `follow` what is added until the run has ended."""
    while True:
        goes_on = follow and _is_going_on(run_dir)  # checked before reading, so that the last lines are printed
        text = read()
        if lines is not None:
            text, lines = "".join(text.splitlines(keepends=True)[-lines:] if lines else []), None
        sys.stdout.write(text)
        sys.stdout.flush()
        if not goes_on:
            return
        time.sleep(0.5)
