"""The live state of a rank: what the rank does now, how long each phase of its start took, and whether the run's time
is over.

A run's time ends with its job's limit, or with `train.exit_after`.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ppctl.config.quantities import seconds
from ppctl.hang.progress import seconds_to_leave
from ppctl.host.processes import HANDED_OVER, started
from ppctl.rank.own_process import StopRequest
from ppctl.rank.watchdog import Alarm
from ppctl.runs.heartbeat import HeartbeatFile
from ppctl.runs.run_starts import slurm_job
from ppctl.train.callback import TIME_IS_OVER, Callback


class Phases:
    """Seconds by name of phase, in the order of the phases. A phase entered twice has the sum."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        """Add `seconds` to the phase `name`."""
        self.seconds[name] = round(self.seconds.get(name, 0.0) + seconds, 3)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the body as the phase `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - began)

    def line(self) -> str:
        """`start-up 4.1 s: import 2.9, groups 0.3, build 0.9`, for a person."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"start-up {sum(self.seconds.values()):.1f} s: {parts}"


@dataclass
class TimeLeft:
    """Rank 0's clock: `enter` records when a state begins; `over`, once a step, returns whether the run has to stop."""

    exit_at: float | None = None
    """When `train.exit_after` is over, in seconds since the epoch."""
    job_end: float | None = None
    """When the scheduler ends the job, in seconds since the epoch."""
    clock: Callable[[], float] = time.time
    slowest_save: float | None = None
    """Seconds of the slowest save so far; None before the first save."""
    saved_bytes: int = 0
    """Bytes of a save, from which the time of the first save is estimated."""
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    """Seconds of the last steps."""
    _doing: tuple[str, float] | None = None

    def enter(self, state: str) -> None:
        """`state` begins now, and the state before it ends."""
        now = self.clock()
        if self._doing is not None:
            before, since = self._doing
            if before == "training":
                self.steps.append(now - since)
            elif before == "saving":
                self.note_save(now - since)
        self._doing = (state, now)

    def note_save(self, seconds: float) -> None:
        """Record how long a save took, in the step or in the background."""
        self.slowest_save = max(self.slowest_save or 0.0, seconds)

    def over(self) -> bool:
        """Whether the run has to stop now: `exit_at` has come, or the job's time left is needed to save and end."""
        now = self.clock()
        if self.exit_at is not None and now >= self.exit_at:
            return True
        running = [now - self._doing[1]] if self._doing is not None and self._doing[0] == "training" else []
        needed = seconds_to_leave(self.slowest_save, self.saved_bytes, max([*self.steps, *running], default=0.0))
        return self.job_end is not None and self.job_end - now < needed


class LiveState(Callback):
    """Follows a rank's states: its heartbeat, its alarm and, on rank 0, its clock; says when the run has to stop."""

    def __init__(
        self, heartbeat: HeartbeatFile, alarm: Alarm, time_left: TimeLeft, stop: StopRequest, loaded: Callable[[], None]
    ) -> None:
        """`loaded()` is called when the first state begins: after a start's phases comes training."""
        self._heartbeat, self._alarm, self._time_left = heartbeat, alarm, time_left
        self._stop, self._loaded = stop, loaded
        self._begun = False

    def enter(self, state: str, step: int) -> None:
        """Publish the state; `updating` is a part of a training step, and counts in the step's limit and time."""
        self._heartbeat.step = step
        self._heartbeat.set_state(state)
        if not self._begun:
            self._begun = True
            self._loaded()
        if state != "updating":
            self._alarm.set(state)
            self._time_left.enter(state)

    def stop_requested(self) -> int:
        """TIME_IS_OVER, or the number of the signal that asked this rank to stop; 0 if it need not stop."""
        return TIME_IS_OVER * self._time_left.over() or self._stop()


def time_left(exit_after: str | None) -> TimeLeft:
    """The clock of a run that ends `train.exit_after` after its start, or with its job."""
    return TimeLeft(None if exit_after is None else time.time() - process_age() + seconds(exit_after), job_end())


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """When SLURM will end this job, in seconds since the epoch; None outside a job, and if SLURM does not answer."""
    job = slurm_job(environ)
    if not job:
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError, LookupError):
        command = ("squeue", "-h", "-j", job, "-o", "%e")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return time.mktime(time.strptime(done.stdout.split()[0][:19], "%Y-%m-%dT%H:%M:%S"))
    return None


def process_age() -> float:
    """Seconds since this process began, or became a rank; without /proc, the process's CPU time so far."""
    if HANDED_OVER in os.environ:
        return time.monotonic() - float(os.environ[HANDED_OVER])
    ticks = started(os.getpid())
    if ticks is not None:
        # The clock of `ticks`: /proc/uptime may be the container's.
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    return time.process_time()
