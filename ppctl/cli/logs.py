"""`ppctl logs [RUN]`: the output of a run: its steps, its job's log if it was submitted, or one rank's log."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path

from ppctl.cli.console import note, width
from ppctl.cli.runs import STARTED, add_run_arguments, named_run
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import open_regular
from ppctl.launch import slurm
from ppctl.records.step_lines import WIDE, StepLines
from ppctl.runs.rundir import RunDir, odd


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run_arguments(parser)
    parser.add_argument("--rank", type=int, metavar="N", help="print the log of rank N: warnings and tracebacks")
    parser.add_argument("-n", "--lines", type=int, metavar="N", help="print only the last N lines")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines until the run has ended")


def run(args: argparse.Namespace) -> int:
    """Print a run's steps, its job's log or a rank's. Raises ConfigError (PP-E611) if there is no such log."""
    run_dir = named_run(args)
    job = run_dir.job()
    if args.rank is None and not slurm.is_job(job.get("job", "0")):
        from ppctl.launch import kubernetes  # imports yaml and all of a plan

        for piece in kubernetes.log(job["job"], job.get("cluster", ""), lines=args.lines, follow=args.follow):
            print(piece, end="", flush=True)
        return 0
    if args.rank is None and not job:
        shown = _follow(run_dir, _steps(run_dir, args.lines), args.lines, follow=args.follow)
        message = run_dir.status().get("message") or ("" if shown else f"run {run_dir.id} has done no step")
        if message:
            note(message)
        return 0
    path = run_dir.job_log if args.rank is None else run_dir.log(args.rank)
    if not path.exists() and not (args.follow and _is_going_on(run_dir)):
        names = ", ".join(sorted(file.name for file in path.parent.glob("*.log"))) or "none"
        message = f"there is no {path.name} in {path.parent} (yet); there are: {names}"
        raise ConfigError(Problem("PP-E611", message, f"ppctl status {pasted(run_dir.path)}", str(run_dir.path)))
    if path.exists() and not path.stat().st_size and not args.follow:
        note(f"{path} is empty: nothing was printed")
    _follow(run_dir, _log(path), args.lines, follow=args.follow)
    return 0


def _log(path: Path) -> Iterator[str]:
    """Yield, for ever, the text that the file has gained; empty while there is none. Raises ConfigError."""
    at = 0
    while True:
        text = ""
        try:
            with TextIOWrapper(open_regular(path, follow=False), "utf-8", "replace") as file:
                file.seek(at)
                text, at = file.read(), file.tell()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise ConfigError(odd(path, error.strerror)) from error
        yield text


def _steps(run_dir: RunDir, lines: int | None) -> Iterator[str]:
    """Yield, for ever, the lines of new steps, as the run printed them; at first the last `lines` (None: all)."""
    metrics, last = run_dir.metrics_file(last=lines), 0
    shown = StepLines(run_dir.read_config().train.steps, width(WIDE))
    while True:
        records = [record for record in metrics.read() if record["step"] > last]
        last = records[-1]["step"] if records else last
        yield "".join(f"{line}\n" for record in records for line in shown.lines(record))


def _is_going_on(run_dir: RunDir) -> bool:
    return run_dir.status()["state"] in ("queued", *STARTED)


def _follow(run_dir: RunDir, added: Iterator[str], lines: int | None, *, follow: bool) -> bool:
    """Print what `added` yields: of the first text the last `lines` (None: all), and with `follow` later ones until the
    run ends. Returns whether there was any text."""
    anything = False
    while True:
        goes_on = follow and _is_going_on(run_dir)  # checked before reading, so that the last lines are printed
        text = next(added)
        anything = anything or bool(text)
        if lines is not None:
            text, lines = "".join(text.splitlines(keepends=True)[-lines:] if lines else []), None
        sys.stdout.write(text)
        sys.stdout.flush()
        if not goes_on:
            return anything
        time.sleep(0.5)
