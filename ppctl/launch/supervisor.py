"""The local launcher: runs a job on this machine and answers for how it ends.

Knows exit codes, status.json and what a person is told. Must not know what a rank does: a rank tells by its exit code,
its error record, its heartbeat and status.json. Torch-free. How the ranks are watched and ended is in `watch.py`.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from ppctl import heartbeat
from ppctl.errors import ConfigError, Problem
from ppctl.launch.environment import choose_port
from ppctl.launch.report import failures, report
from ppctl.launch.signals import Signals
from ppctl.launch.watch import Job, Watch

DONE, STOPPED, INTERRUPTED, TERMINATED = 0, 75, 130, 143
_PORT_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended."""

    exit_code: int
    """The launcher's."""
    state: str
    """As in status.json."""
    report: str = ""
    """What to tell on stderr; empty where there is nothing to tell."""


def supervise(job: Job, out: TextIO | None = None) -> Outcome:
    """Run `job` to its end; rank 0's stdout goes to `out` (default: stdout) line by line, the rest to logs/.

    Leaves no process, and a status.json that says how it ended. Call it from the main thread. Raises ConfigError where
    MASTER_PORT is set and in use (PP-E605) or a process cannot be started (PP-E614).
    """
    heartbeat.sweep()
    with Signals() as signals:
        for left in reversed(range(_PORT_ATTEMPTS)):
            port = choose_port(job.environment)
            watch = Watch(job, signals, out or sys.stdout)
            try:
                watch.run(port)
            except OSError as error:
                raise _cannot_start(job, error) from error
            if not (left and _port_was_lost(watch)):
                break
            job.run.forget_errors()
    outcome = _judge(watch)
    if outcome.state != job.run.status()["state"] or outcome.report:
        _write_status(watch, outcome)
    return outcome


def _judge(watch: Watch) -> Outcome:
    said = watch.job.run.status()["state"]
    if watch.cause == "failure":
        found = failures(list(watch.exits.values()), [*watch.job.run.errors(), *watch.unwritten])
        return Outcome(found[0].exit_code, "failed", report(watch.job.run, found, watch.states, watch.job.world_size))
    if watch.cause == "interrupt":
        return Outcome(INTERRUPTED, "interrupted", "interrupted: all ranks were ended, nothing more was saved")
    if watch.cause == "terminated":
        return Outcome(TERMINATED, "interrupted", "terminated: the ranks were ended before all had saved")
    if said == "stopped":
        return Outcome(STOPPED, "stopped")
    if watch.asked is not None and said != "finished":
        text = "terminated: the ranks left when they were asked to stop, and did not say that they saved"
        return Outcome(TERMINATED, "interrupted", text)
    return Outcome(DONE, "finished")


def _write_status(watch: Watch, outcome: Outcome) -> None:
    run = watch.job.run
    step = max((state.step for state in watch.states.values()), default=run.status().get("step"))
    line = outcome.report.partition("\n")[0]
    told = {"step": step, "exit_code": outcome.exit_code, "message": line}
    try:
        try:
            run.write_status(outcome.state, **told)
        except OSError:  # the disk is full, and nobody needs the heartbeats any more
            run.forget_heartbeats()
            run.write_status(outcome.state, **told)
    except OSError as error:
        print(f"warning: {run.path / 'status.json'} cannot be written: {error.strerror}", file=sys.stderr)


def _port_was_lost(watch: Watch) -> bool:
    """Whether rank 0 found the port taken, between its choice here and its use there."""
    if watch.cause != "failure" or "MASTER_PORT" in os.environ | dict(watch.job.environment):
        return False
    text = " ".join(failure.message for failure in watch.job.run.errors())
    return "EADDRINUSE" in text or "address already in use" in text.lower()


def _cannot_start(job: Job, error: OSError) -> ConfigError:
    problem = Problem("PP-E614", f"the ranks cannot be started: {error}", "df -h . ; ulimit -u", str(job.run.path))
    with suppress(OSError):  # the disk may be what is full; the problem itself is told
        job.run.write_status("failed", message=problem.message, exit_code=ConfigError.exit_code)
    return ConfigError(problem)
