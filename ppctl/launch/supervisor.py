"""The local launcher: starts one process per rank, waits, and answers for how the job ends.

Knows processes, signals and exit codes. Must not know what a rank does: a rank tells by its exit code, its error record,
its heartbeat and status.json. Torch-free, and it never waits in a busy loop.

    a rank fails      the others are ended at once (SIGINT, then SIGKILL); exit 1, or the code that the rank names
    SIGTERM, SIGUSR1  passed on until all have saved and left with 0: exit 75; too late, or SIGTERM again: ended, 143
    SIGINT            all are ended: exit 130
    SIGKILL           the kernel ends the ranks (process.py)
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from ppctl import heartbeat
from ppctl.launch.environment import choose_port, rank_environment
from ppctl.launch.output import Pump
from ppctl.launch.process import RankProcess
from ppctl.launch.report import Exit, failures, report
from ppctl.launch.signals import Signals
from ppctl.rundir import RunDir

DONE, FAILED, STOPPED, INTERRUPTED, TERMINATED = 0, 1, 75, 130, 143

_PORT_ATTEMPTS = 3
_ASK_AGAIN = 1.0
_ONE_PRESS = 1.0
"""Seconds within which the same signal counts once: make and timeout pass on what the terminal has sent already."""
_UNKILLABLE = 5.0


@dataclass(frozen=True, slots=True)
class Job:
    """What to start."""

    run: RunDir
    world_size: int
    device: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict)
    """`launch.env`, set for every rank."""
    command: Sequence[str] = ()
    """The rank's command; without one, this interpreter runs ppctl.worker on the run directory."""
    stop_grace: float = 60.0
    """Seconds that the ranks have to save and leave after a request to stop."""
    kill_grace: float = 3.0
    """Seconds between asking a rank to end and killing it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the job ended."""

    exit_code: int
    state: str
    """As in status.json."""
    report: str = ""
    """What to tell on stderr; empty where all went well."""


def supervise(job: Job, out: TextIO | None = None) -> Outcome:
    """Run `job` to its end; rank 0's stdout goes to `out` (default: stdout) line by line, the rest to logs/.

    Leaves no process, and status.json that says how it ended. Must be called from the main thread. Raises ConfigError
    (PP-E605) where MASTER_PORT is set and in use.
    """
    heartbeat.sweep()
    with Signals() as signals:
        for attempt in range(_PORT_ATTEMPTS):
            port = choose_port(job.environment)
            watch = _Watch(job, signals, out or sys.stdout)
            watch.run(port)
            if not watch.port_was_lost() or attempt + 1 == _PORT_ATTEMPTS:
                break
            job.run.forget_errors()
    return watch.outcome()


class _Watch:
    """One attempt to run the job."""

    def __init__(self, job: Job, signals: Signals, out: TextIO) -> None:
        self.job = job
        self.signals = signals
        self.out = out
        self.ranks: list[RankProcess] = []
        self.exits: list[Exit] = []
        self.beats: dict[int, heartbeat.Beat] = {}
        self.cause: str | None = None
        """Why the launcher ends the ranks: `failure`, `interrupt`, `terminated`; None while it does not."""
        self.asked: int | None = None
        """The signal that asks the ranks to save and leave."""
        self.first_seen: dict[int, float] = {}
        self.deadline: float | None = None
        self.killed = False

    def run(self, port: int) -> None:
        """Start all ranks and return when none is left."""
        run, world = self.job.run, self.job.world_size
        run.write_status("starting", host=heartbeat.host_name(), pid=os.getpid())
        everyone = range(world)
        publisher = heartbeat.Publisher(run.id, everyone, run.write_heartbeats)
        pump: Pump | None = None
        try:
            for rank in everyone:
                heartbeat.create(run.id, rank, owner=os.getpid())
                self.ranks.append(self._start(rank, port))
            pump = Pump(self.ranks[0].stdout, self.out)
            publisher.start()
            self._wait()
        finally:
            self._end_all()
            publisher.stop()
            if pump is not None:
                pump.finish()
            self.beats = {b.rank: b for b in (heartbeat.read(run.id, rank) for rank in everyone) if b is not None}
            heartbeat.remove(run.id, everyone)

    def _start(self, rank: int, port: int) -> RankProcess:
        job = self.job
        command = job.command or (sys.executable, "-m", "ppctl.worker", "--run", str(job.run.path))
        environment = rank_environment(rank, job.world_size, port, job.device, job.environment)
        return RankProcess(rank, command, environment, job.run.log(rank), piped=rank == 0)

    def _wait(self) -> None:
        while self._alive():
            for number in self.signals.wait(self._timeout()):
                self._hear(number)
            self._reap()
            if self.deadline is not None and time.monotonic() >= self.deadline and not self._late():
                return
            if self.asked is not None and self.cause is None:
                self._ask()

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self.ranks if rank.returncode is None]

    def _timeout(self) -> float | None:
        if self.deadline is None:
            return None
        left = max(0.0, self.deadline - time.monotonic())
        return min(left, _ASK_AGAIN) if self.cause is None else left

    def _hear(self, number: int) -> None:
        again = time.monotonic() - self.first_seen.setdefault(number, time.monotonic()) > _ONE_PRESS
        if number == signal.SIGINT:
            self._end("interrupt", signal.SIGKILL if again else signal.SIGINT)
        elif number == signal.SIGTERM and again:
            self._end("terminated")
        elif number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP) and self.asked is None and self.cause is None:
            self.asked = signal.SIGTERM if number == signal.SIGHUP else number
            self.deadline = time.monotonic() + self.job.stop_grace
            self._ask()

    def _ask(self) -> None:
        """Ask all ranks to save and leave. Again and again: a rank that still starts ignores it."""
        for rank in self._alive():
            rank.ask(self.asked or signal.SIGTERM)

    def _reap(self) -> None:
        if not self._collect():
            return
        # Whoever died first was dead before its victims were: look once more before judging.
        self._collect()
        codes = {end.returncode for end in self.exits if end.returncode and not end.ended}
        if codes and self.cause is None:
            self._end("terminated" if self.asked is not None and codes <= {-self.asked} else "failure")

    def _collect(self) -> bool:
        """Note the ranks that have ended; whether any of them failed."""
        failed = False
        for rank in self._alive():
            code = rank.poll()
            if code is not None:
                self.exits.append(Exit(rank.rank, code, time.time(), ended=self.cause is not None))
                failed = failed or code != 0
        return failed

    def _end(self, cause: str, number: int = signal.SIGINT) -> None:
        """End every rank: nothing is saved from here on. The first cause is the one that counts."""
        if self.cause is not None and number != signal.SIGKILL:
            return
        self.cause = self.cause or cause
        self.deadline = time.monotonic() + (_UNKILLABLE if number == signal.SIGKILL else self.job.kill_grace)
        self.killed = number == signal.SIGKILL
        for rank in self._alive():
            rank.end(number)

    def _late(self) -> bool:
        """A deadline has passed: take the next step. False when there is none left (a process that cannot be killed)."""
        if self.cause is None:
            self._end("terminated")
        elif not self.killed:
            self._end(self.cause, signal.SIGKILL)
        else:
            return False
        return True

    def _end_all(self) -> None:
        """Whatever has happened, nobody stays."""
        if self._alive():
            self._end("failure", signal.SIGKILL)
            while self._alive() and time.monotonic() < (self.deadline or 0.0):
                self.signals.wait(0.1)
                self._collect()

    def port_was_lost(self) -> bool:
        """Whether rank 0 found the port taken, between its choice here and its use there."""
        if self.cause != "failure" or "MASTER_PORT" in os.environ | dict(self.job.environment):
            return False
        text = " ".join(str(error.get("message")) for error in self.job.run.errors())
        return "EADDRINUSE" in text or "already in use" in text

    def outcome(self) -> Outcome:
        """Judge, and write it into status.json."""
        run = self.job.run
        before = run.status()
        if self.cause == "failure":
            found = failures(self.exits, run.errors())
            text = report(run, found, self.beats, self.job.world_size)
            outcome = Outcome(found[0].exit_code, "failed", text)
        elif self.cause == "interrupt":
            outcome = Outcome(INTERRUPTED, "interrupted", "interrupted: all ranks were ended, nothing was saved")
        elif self.cause == "terminated":
            outcome = Outcome(TERMINATED, "interrupted", "terminated before all ranks had saved")
        elif before["state"] == "stopped":
            return Outcome(STOPPED, "stopped")
        elif self.asked is not None and before["state"] != "finished":
            outcome = Outcome(
                TERMINATED, "interrupted", "the ranks left when asked to stop, and did not say that they saved"
            )
        else:
            outcome = Outcome(DONE, "finished")
            if before["state"] == "finished":
                return outcome
        self._tell(outcome, before.get("step"))
        return outcome

    def _tell(self, outcome: Outcome, step: int | None) -> None:
        step = max((beat.step for beat in self.beats.values()), default=step)
        line = outcome.report.partition("\n")[0]
        try:
            self.job.run.write_status(outcome.state, step=step, exit_code=outcome.exit_code, message=line)
        except OSError as error:
            print(f"warning: status.json cannot be written: {error.strerror}", file=sys.stderr)
