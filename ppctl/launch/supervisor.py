"""The local launcher: runs a job on this machine, and returns how it ended.

Knows exit codes, status.json and what is printed. Must not know what a rank does: a rank reports by its exit code, its
error record, its heartbeat and status.json. `watch.py` starts, watches and ends the ranks. Torch-free.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TextIO

from ppctl.errors import ConfigError, Problem
from ppctl.launch.outcome import DONE, INTERRUPTED, STOPPED, TERMINATED, JobOutcome, failures, report
from ppctl.launch.watch import LocalJob, Signals, Watch


def supervise(job: LocalJob, out: TextIO | None = None) -> JobOutcome:
    """Run `job` to its end; rank 0's stdout goes to `out` (default: stdout) line by line, all else to logs/.

    Leaves no process behind, and a status.json with the outcome. Call it from the main thread. Raises ConfigError if a
    process cannot be started (PP-E614).
    """
    with Signals() as signals:
        watch = Watch(job, signals, out or sys.stdout, _say)
        try:
            watch.run()
        except OSError as error:
            raise _cannot_start(job, error) from error
    outcome = _outcome(watch)
    try:
        try:
            outcome.write(job.run, watch.states.values())
        except OSError:  # the disk is full, and nobody needs the heartbeats any more
            job.run.forget_heartbeats()
            outcome.write(job.run, watch.states.values())
    except OSError as error:
        print(f"warning: {job.run.path / 'status.json'} cannot be written: {error.strerror}", file=sys.stderr)
    return outcome


def _outcome(watch: Watch) -> JobOutcome:
    run, state = watch.job.run, watch.job.run.status()["state"]
    if watch.cause == "failure":
        found = failures(list(watch.exits.values()), [*run.errors(), *watch.unwritten_errors])
        return JobOutcome(found[0].exit_code, "failed", report(run, found, watch.states, watch.job.world_size))
    if watch.cause == "interrupt":
        return JobOutcome(INTERRUPTED, "interrupted", "interrupted: all ranks were ended, nothing more was saved")
    if watch.cause == "terminated":
        return JobOutcome(TERMINATED, "interrupted", "terminated: the ranks were ended before all had saved")
    if state == "stopped":
        return JobOutcome(STOPPED, "stopped", "stopped by Ctrl-C" if watch.asked_by_key else "")
    if watch.asked is not None and state != "finished":
        text = "terminated: the ranks left when they were asked to stop, and did not report that they saved"
        return JobOutcome(TERMINATED, "interrupted", text)
    return JobOutcome(DONE, "finished")


def _say(line: str) -> None:
    """Print for the person at the terminal, on a line of its own behind the ^C that it shows."""
    print(f"\n{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def _cannot_start(job: LocalJob, error: OSError) -> ConfigError:
    problem = Problem("PP-E614", f"the ranks cannot be started: {error}", "df -h . ; ulimit -u", str(job.run.path))
    with suppress(OSError):  # the disk may be full; the problem is printed all the same
        job.run.write_status("failed", message=problem.message, exit_code=ConfigError.exit_code)
    return ConfigError(problem)
