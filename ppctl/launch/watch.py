"""Watching the ranks of one job from their start until none is left.

Knows processes, signals and deadlines. Must not know exit codes of the launcher, nor what anyone is told.

    a rank fails               the others are ended: SIGINT, then SIGKILL
    SIGTERM, SIGUSR1, SIGHUP   passed on, until all have saved and left; too late, or SIGTERM again: ended
    SIGINT                     all are ended; again: at once
    SIGKILL                    the kernel ends the ranks (process.py)
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
from ppctl.hang.limits import Limits, Progress
from ppctl.hang.verdict import verdict
from ppctl.launch.environment import rank_environment
from ppctl.launch.output import Pump
from ppctl.launch.process import RankProcess
from ppctl.launch.report import Exit
from ppctl.launch.signals import Signals
from ppctl.rank_records import RankFailure, RankState
from ppctl.run_starts import sweep
from ppctl.rundir import RunDir

_ASK_AGAIN = 1.0
_ONE_PRESS = 1.0
"""Seconds within which the same signal counts once: make and timeout pass on what the terminal has sent already."""
_UNKILLABLE = 5.0
_LOOK = 1.0
"""Seconds between two looks at whether anything moves."""
_STACKS = 2.0
"""Seconds that ranks have to write stacks and flight records, on a machine that is busy with the others."""


@dataclass(frozen=True, slots=True)
class Job:
    """What to start."""

    run: RunDir
    world_size: int
    environment: Mapping[str, str] = field(default_factory=dict)
    """`launch.env`, set for every rank."""
    command: Sequence[str] = ()
    """A rank's command; empty: this interpreter runs ppctl.rank.worker on the run directory."""
    stop_grace: float = 60.0
    """Seconds that the ranks have to save and leave after a request to stop."""
    kill_grace: float = 3.0
    """Seconds between telling a rank to end and killing it."""
    limits: Limits | None = None
    """How long nothing may move; none waits for ever."""
    first_step: int = 0
    """The step that this life begins with."""


class Watch:
    """One attempt to run a job. What it found is in `exits`, `states`, `cause` and `asked`."""

    def __init__(self, job: Job, signals: Signals, out: TextIO) -> None:
        self.job = job
        self.exits: dict[int, Exit] = {}
        self.states: dict[int, RankState] = {}
        """What each rank was doing last."""
        self.unwritten: list[RankFailure] = []
        """Failures that ranks could not write to the run directory."""
        self.cause: str | None = None
        """Why the launcher ended the ranks: `failure`, `interrupt`, `terminated`; None where it did not."""
        self.asked: int | None = None
        """The signal by which the ranks were asked to save and leave."""
        self._signals = signals
        self._out = out
        self._ranks: list[RankProcess] = []
        self._first_heard: dict[int, float] = {}
        self._unheard: set[int] = set()
        """Ranks that have been asked to stop, if at all, before they could hear it."""
        self._deadline: float | None = None
        self._killed = False
        self._progress = Progress(job.limits, time.monotonic(), job.first_step) if job.limits is not None else None

    def run(self, port: int) -> None:
        """Start all ranks and return when none is left, whatever happens."""
        run, everyone = self.job.run, range(self.job.world_size)
        # While all goes well a rank publishes; what they did last is for the launcher to tell.
        publisher = heartbeat.Publisher(run.id, everyone, run.write_heartbeats)
        pump: Pump | None = None
        run.write_status("starting")
        try:
            for rank in everyone:
                heartbeat.create(run.id, rank, owner=os.getpid())
                self._ranks.append(self._start(rank, port))
            pump = Pump(self._ranks[0].stdout, self._out)
            run.write_status("running")
            self._wait()
        finally:
            self._end_all()
            publisher.publish()
            if pump is not None:
                pump.finish()
            self.states = {state.rank: state for state in heartbeat.read_all(run.id, everyone)}
            self.unwritten += heartbeat.take_failures(run.id, everyone)
            heartbeat.remove(run.id, everyone)
            if not self._alive():
                sweep(run)

    def _start(self, rank: int, port: int) -> RankProcess:
        job = self.job
        command = job.command or (sys.executable, "-m", "ppctl.rank.worker", "--run", str(job.run.path))
        environment = rank_environment(rank, job.world_size, port, job.environment)
        return RankProcess(rank, command, environment, job.run.log(rank), piped=rank == 0)

    def _wait(self) -> None:
        while self._alive():
            for number in self._signals.wait(self._timeout()):
                self._hear(number)
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._late():
                return
            if self._unheard and self.cause is None:
                self._ask(self.asked or signal.SIGTERM)
            if self._progress is not None and self.cause is None:
                self._look(self._progress)

    def _look(self, progress: Progress) -> None:
        """End a job in which nothing moves any more: who is waited for is told first."""
        now = time.monotonic()
        states = heartbeat.read_all(self.job.run.id, (rank.rank for rank in self._alive()))
        still = progress.late(states, now)
        if still is None:
            return
        for rank in self._alive():  # every stack goes to its log, also out of a call that never returns
            rank.ask(signal.SIGUSR2)
        failure = verdict(self.job.run.read_plan(), states, still, now)
        try:
            self.job.run.write_error(failure)
        except OSError:
            self.unwritten.append(failure)
        self._signals.wait(_STACKS)
        self._end("failure", signal.SIGKILL)

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.rank not in self.exits]

    def _timeout(self) -> float | None:
        if self._deadline is None:
            return None if self._progress is None else _LOOK
        left = max(0.0, self._deadline - time.monotonic())
        return min(left, _ASK_AGAIN) if self._unheard and self.cause is None else left

    def _hear(self, number: int) -> None:
        now = time.monotonic()
        again = now - self._first_heard.setdefault(number, now) > _ONE_PRESS
        if number == signal.SIGINT:
            self._end("interrupt", signal.SIGKILL if again else signal.SIGINT)
        elif number == signal.SIGTERM and again:
            self._end("terminated")
        elif number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP) and self.asked is None and self.cause is None:
            self.asked = signal.SIGTERM if number == signal.SIGHUP else number
            self._unheard = set(range(self.job.world_size))
            self._deadline = now + self.job.stop_grace

    def _ask(self, number: int) -> None:
        """Ask the ranks to save and leave: each once, but one that is still starting ignores it and is asked again.

        Never more than that: a rank that has saved and is on its way out would die of it.
        """
        for rank in self._alive():
            if rank.rank in self._unheard:
                state = heartbeat.read(self.job.run.id, rank.rank)
                rank.ask(number)
                if state is not None and state.state != "starting":
                    self._unheard.discard(rank.rank)

    def _reap(self) -> None:
        if not self._collect():
            return
        # Whoever died first was dead before its victims were: look once more before judging.
        self._collect()
        codes = {end.returncode for end in self.exits.values() if end.returncode and not end.ended}
        if codes and self.cause is None:
            self._end("terminated" if self.asked is not None and codes == {-self.asked} else "failure")

    def _collect(self) -> bool:
        """Note the ranks that have ended; whether any of them failed."""
        failed = False
        for rank in self._alive():
            code = rank.poll()
            if code is not None:
                self.exits[rank.rank] = Exit(rank.rank, code, time.time(), ended=self.cause is not None)
                failed = failed or code != 0
        return failed

    def _end(self, cause: str, number: int = signal.SIGINT) -> None:
        """End every rank: nothing is saved from here on. The first cause is the one that counts."""
        if self.cause is not None and number != signal.SIGKILL:
            return
        self.cause = self.cause or cause
        self._killed = number == signal.SIGKILL
        self._deadline = time.monotonic() + (_UNKILLABLE if self._killed else self.job.kill_grace)
        for rank in self._alive():
            rank.end(number)

    def _late(self) -> bool:
        """A deadline has passed: take the next step. False when none is left (a process that cannot be killed)."""
        if self.cause is not None and self._killed:
            return False
        self._end(self.cause or "terminated", signal.SIGINT if self.cause is None else signal.SIGKILL)
        return True

    def _end_all(self) -> None:
        """Nobody stays, whatever brought us here."""
        if self._alive() and not self._killed:
            self._end("failure", signal.SIGKILL)
            while self._alive() and time.monotonic() < (self._deadline or 0.0):
                self._signals.wait(0.1)
                self._collect()
