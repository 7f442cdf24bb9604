"""The local launcher: runs a job on this machine, watches its ranks until none is left, and returns the outcome.

A rank reports by its exit code, its error record, its heartbeat and status.json. Events:

    a rank fails               the launcher ends the others: SIGINT, then SIGKILL
    SIGTERM, SIGUSR1, SIGHUP   passed on; the ranks have `stop_grace` seconds to save and leave, and are ended after
                               that, or when SIGTERM comes a second time
    SIGINT                     before a step is done: all ranks are ended; else they are asked to save and leave,
                               without a limit of time, since somebody is there, until another signal comes; one
                               more SIGINT ends them, the next kills
    SIGKILL                    the kernel kills the ranks (process.py)
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any

from ppctl.errors import ConfigError, Problem
from ppctl.hang.progress import Limits, Progress
from ppctl.hang.verdict import verdict
from ppctl.host.private_files import NODE_DIRECTORY
from ppctl.host.processes import python
from ppctl.launch.environment import rank_environment
from ppctl.launch.outcome import DONE, INTERRUPTED, STOPPED, TERMINATED, Exit, JobOutcome, failures, report, terminated
from ppctl.launch.process import LAST_LINES, RankProcess, copy_lines, writer_to
from ppctl.records.rank_records import RankFailure, RankState
from ppctl.runs import heartbeat
from ppctl.runs.run_starts import sweep
from ppctl.runs.rundir import RunDir

_ASK_AGAIN = 1.0
"""Seconds between two requests to stop to a rank that is still starting."""
_ONE_PRESS = 0.3
"""Seconds within which the same signal counts once: make and timeout repeat the terminal's signals, and a person who
presses a key twice takes longer. siginfo has the sender (terminal or process), but Python's handlers do not get it, and
`sigwaitinfo` does not wait for pipes too."""
_AFTER_KILL = 5.0
"""Seconds to wait for a killed process; a process in an uninterruptible system call may stay."""
_PROGRESS_INTERVAL_S = 1.0
_STACKS = 2.0
"""Seconds that ranks have to write stacks and flight records, on a machine with busy ranks."""
_CAUGHT = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def _no_action(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes the signal's number into the wake-up pipe."""


class Signals:
    """Signals and deaths of children as a list to wait for, without a busy loop or work inside a handler. While
    entered, `_CAUGHT` and SIGCHLD arrive through `wait`; a signal that was ignored before stays ignored."""

    def __enter__(self) -> Signals:
        self._reader, self._writer = os.pipe()
        for end in (self._reader, self._writer):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        caught = [number for number in _CAUGHT if signal.getsignal(number) is not signal.SIG_IGN]
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, _no_action) for number in (*caught, signal.SIGCHLD)
        }
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._wakeup)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        os.close(self._reader)
        os.close(self._writer)

    def wait(self, timeout: float | None) -> list[int]:
        """The signals that came, in order; empty after `timeout` seconds (None waits for the next one)."""
        readable, _, _ = select.select([self._reader], [], [], timeout)
        return list(os.read(self._reader, 4096)) if readable else []


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job of which this machine runs all ranks."""

    run: RunDir
    world_size: int
    directory: Path
    """This start's own directory on this machine: heartbeats, and failures that could not be written to the run
    directory."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """`launch.env`, set for every rank."""
    command: Sequence[str] = ()
    """A rank's command; empty: this interpreter runs ppctl.rank.worker on the run directory."""
    stop_grace: float = 60.0
    """Seconds that the ranks have to save and leave after a request to stop."""
    kill_grace: float = 3.0
    """Seconds between SIGINT and SIGKILL."""
    limits: Limits | None = None
    """The limits of time without progress; None: no limits."""
    first_step: int = 0
    """The step that this start begins with."""


class Watch:
    """One attempt to run a job. Its result is in `exits`, `states`, `unwritten_errors`, `cause` and `asked`."""

    def __init__(
        self, job: LocalJob, signals: Signals, show: Callable[[str], None], say: Callable[[str], None]
    ) -> None:
        """`show` takes lines of rank 0's stdout; `say` lines for the person at the terminal."""
        self.job = job
        self.exits: dict[int, Exit] = {}
        self.states: dict[int, RankState] = {}
        """The last state of each rank, when `run` has returned."""
        self.unwritten_errors: list[RankFailure] = []
        """Failures that could not be written to the run directory."""
        self.cause: str | None = None
        """Why the launcher ended the ranks: `failure`, `interrupt`, `terminated`; None if it did not."""
        self.asked: int | None = None
        """The signal by which the ranks were asked to save and leave."""
        self.asked_by_key = False
        """Whether the request to save and leave came from Ctrl-C."""
        self._signals = signals
        self._show = show
        self._say = say
        self._ranks: list[RankProcess] = []
        self._counted: dict[int, float] = {}
        """Signal -> the time at which it last counted."""
        self._to_ask: set[int] = set()
        """Ranks to ask (again) to stop: a rank that is still starting ignores the request."""
        self._deadline: float | None = None
        self._killed = False
        self._progress = Progress(job.limits, time.monotonic(), job.first_step) if job.limits is not None else None

    def run(self) -> None:
        """Start all ranks and return when none is left that can be killed. Raises OSError if one cannot be started."""
        run, everyone = self.job.run, range(self.job.world_size)
        # Rank 0 publishes heartbeats while it lives; the launcher publishes the last ones of all ranks.
        publisher = heartbeat.Publisher(self.job.directory, everyone, run.write_heartbeats)
        output: Thread | None = None
        run.write_status("starting")
        try:
            for rank in everyone:
                heartbeat.create(self.job.directory, rank)
                self._ranks.append(self._start(rank))
            output = copy_lines(self._ranks[0].stdout, self._show)
            run.write_status("running")
            self._wait()
        finally:
            self._end_all()
            publisher.publish()
            if output is not None:
                output.join(LAST_LINES)
            self.states = {state.rank: state for state in heartbeat.read_all(self.job.directory, everyone)}
            self.unwritten_errors += heartbeat.take_failures(self.job.directory, everyone)
            if not self._alive():
                sweep(run)

    def _start(self, rank: int) -> RankProcess:
        job = self.job
        command = job.command or (*python("ppctl.rank.worker"), "--run", str(job.run.path))
        own = {NODE_DIRECTORY: str(job.directory)}
        environment = rank_environment(rank, job.world_size, job.environment) | own
        return RankProcess(rank, command, environment, job.run.log(rank), piped=rank == 0)

    def _wait(self) -> None:
        while self._alive():
            for number in self._signals.wait(self._timeout()):
                self._handle(number)
            self._reap()
            if self._deadline is not None and time.monotonic() >= self._deadline and not self._escalate():
                return
            if self._to_ask and self.cause is None:
                self._ask(self.asked or signal.SIGTERM)
            if self._progress is not None and self.cause is None:
                self._check_progress(self._progress)

    def _check_progress(self, progress: Progress) -> None:
        """End a job without progress, after writing the error of the rank for which all others wait."""
        now = time.monotonic()
        states = heartbeat.read_all(self.job.directory, (rank.rank for rank in self._alive()))
        still = progress.late(states, now)
        if still is None:
            return
        for rank in self._alive():  # the rank writes its stacks to its log, even inside a call that never returns
            rank.send(signal.SIGUSR2)
        failure = verdict(self.job.run.read_plan(), states, still, now)
        try:
            self.job.run.write_error(failure)
        except OSError:
            self.unwritten_errors.append(failure)
        self._signals.wait(_STACKS)
        self._end("failure", signal.SIGKILL)

    def _alive(self) -> list[RankProcess]:
        return [rank for rank in self._ranks if rank.rank not in self.exits]

    def _timeout(self) -> float | None:
        waits = [] if self._progress is None or self._deadline is not None else [_PROGRESS_INTERVAL_S]
        if self._deadline is not None:
            waits.append(max(0.0, self._deadline - time.monotonic()))
        if self._to_ask and self.cause is None:
            waits.append(_ASK_AGAIN)
        return min(waits, default=None)

    def _handle(self, number: int) -> None:
        """Act on a signal; a repetition within `_ONE_PRESS` seconds is ignored."""
        now = time.monotonic()
        again = number in self._counted
        if again and now - self._counted[number] <= _ONE_PRESS:
            return
        self._counted[number] = now
        if number == signal.SIGINT:
            self._handle_key()
        elif number == signal.SIGTERM and again:
            self._end("terminated")
        elif number in _CAUGHT and self.cause is None and self._deadline is None:
            if self.asked is None:
                self._request_stop(signal.SIGTERM if number == signal.SIGHUP else number)
            self._deadline = now + self.job.stop_grace

    def _handle_key(self) -> None:
        """Act on Ctrl-C: ask the ranks to save if a step is done and they have not been asked, otherwise end the run;
        kill a run that is ending."""
        step = max(
            (state.step for state in heartbeat.read_all(self.job.directory, range(self.job.world_size))), default=0
        )
        if self.cause is not None:
            self._end("interrupt", signal.SIGKILL)
        elif self.asked is not None or step <= self.job.first_step:
            self._end("interrupt")
        else:
            self._say(f"saving after step {step + 1}, then stopping; Ctrl-C once more ends immediately")
            self.asked_by_key = True
            self._request_stop(signal.SIGTERM)

    def _request_stop(self, number: int) -> None:
        self.asked = number
        self._to_ask = set(range(self.job.world_size))

    def _ask(self, number: int) -> None:
        """Ask the ranks to save and leave, each once; a rank that is still starting ignores this and is asked again. A
        further signal would kill a rank that has saved and is about to exit."""
        for rank in self._alive():
            if rank.rank in self._to_ask:
                state = heartbeat.read(self.job.directory, rank.rank)
                rank.send(number)
                if state is not None and state.state != "starting":
                    self._to_ask.discard(rank.rank)

    def _reap(self) -> None:
        if not self._collect():
            return
        # Collect all dead ranks before judging: the first to fail died before those that failed because of it. If
        # somebody signals all processes of a run, the launcher's own signal says why ranks have died.
        until = time.monotonic() + _ONE_PRESS
        while self.asked is not None and self.cause is None and (left := until - time.monotonic()) > 0:
            for number in self._signals.wait(left):
                self._handle(number)
        self._collect()
        codes = {end.returncode for end in self.exits.values() if end.returncode and not end.ended}
        if codes and self.cause is None:
            self._end("terminated" if self.asked is not None and codes == {-self.asked} else "failure")

    def _collect(self) -> bool:
        """Record the ranks that have ended. Returns whether a rank failed."""
        failed = False
        for rank in self._alive():
            code = rank.poll()
            if code is not None:
                self.exits[rank.rank] = Exit(rank.rank, code, time.time(), ended=self.cause is not None)
                failed = failed or code != 0
        return failed

    def _end(self, cause: str, number: int = signal.SIGINT) -> None:
        """Send every rank the signal that ends it without saving. Of several causes the first counts."""
        if self.cause is not None and number != signal.SIGKILL:
            return
        self.cause = self.cause or cause
        self._killed = number == signal.SIGKILL
        self._deadline = time.monotonic() + (_AFTER_KILL if self._killed else self.job.kill_grace)
        for rank in self._alive():
            rank.send_to_group(number)

    def _escalate(self) -> bool:
        """Take the next step after a deadline. Returns False if there is none left (a process cannot be killed)."""
        if self.cause is not None and self._killed:
            return False
        self._end(self.cause or "terminated", signal.SIGINT if self.cause is None else signal.SIGKILL)
        return True

    def _end_all(self) -> None:
        if self._alive() and not self._killed:
            self._end("failure", signal.SIGKILL)
            while self._alive() and time.monotonic() < (self._deadline or 0.0):
                self._signals.wait(0.1)
                self._collect()


def supervise(job: LocalJob, show: Callable[[str], None] | None = None) -> JobOutcome:
    """Run `job` to its end; rank 0's stdout goes to `show` (default: stdout) line by line, all else to logs/. It leaves
    no process behind, and the outcome is in status.json. Call it from the main thread. Raises ConfigError if a process
    cannot be started (PP-E614)."""
    with Signals() as signals:
        watch = Watch(job, signals, show or writer_to(sys.stdout), _say)
        try:
            watch.run()
        except OSError as error:
            raise _cannot_start(job, error) from error
    outcome = _outcome(watch)
    outcome.write(job.run, watch.states.values())
    return outcome


def _outcome(watch: Watch) -> JobOutcome:
    """The outcome, from the watch's cause for ending the job and the state in status.json. A failure comes first."""
    run, state = watch.job.run, watch.job.run.status()["state"]
    if watch.cause == "failure":
        causes = failures(list(watch.exits.values()), [*run.errors(), *watch.unwritten_errors])
        return JobOutcome(causes[0].exit_code, "failed", report(run, causes, watch.states, watch.job.world_size))
    if watch.cause == "interrupt":
        began = watch.job.first_step < max((state.step for state in watch.states.values()), default=0)
        saved = "nothing more was saved" if began else "before the first step: nothing was saved"
        return JobOutcome(INTERRUPTED, "interrupted", f"interrupted: all ranks were ended, {saved}")
    if watch.cause == "terminated":
        return terminated(run, "the ranks were ended")
    if state == "stopped":
        return JobOutcome(STOPPED, "stopped", "stopped by Ctrl-C" if watch.asked_by_key else "")
    if watch.asked is not None and state != "finished":
        text = "terminated: the ranks left when they were asked to stop, but did not report that they saved"
        return JobOutcome(TERMINATED, "interrupted", text)
    return JobOutcome(DONE, "finished")


def _say(line: str) -> None:
    """Print a line for the person at the terminal, below the ^C that it shows."""
    print(f"\n{line}" if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def _cannot_start(job: LocalJob, error: OSError) -> ConfigError:
    problem = Problem("PP-E614", f"the ranks cannot be started: {error}", "df -h . ; ulimit -u", str(job.run.path))
    with suppress(OSError):  # the disk may be full; the problem is printed nevertheless
        job.run.write_status("failed", message=problem.message, exit_code=ConfigError.exit_code)
    return ConfigError(problem)
