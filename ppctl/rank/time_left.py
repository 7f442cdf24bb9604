"""Whether the time that this run has is nearly over: the job's limit, or `train.exit_after`.

Knows how SLURM tells a job's end and how long steps and saves have taken. Must not know signals or what a stop does.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

MARGIN = 60.0
"""Seconds besides saves and steps: SLURM's own clock is coarse, and ranks take their time to leave."""


@dataclass
class TimeLeft:
    """Rank 0's clock. It is told what begins (`enter`) and asked once a step whether to begin the stop (`over`)."""

    exit_at: float | None = None
    """When `train.exit_after` is over; seconds since the epoch, as the next."""
    job_end: float | None = None
    """When the scheduler ends the job."""
    clock: Callable[[], float] = time.time
    slowest_save: float = 0.0
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=10))
    """Seconds of the last steps."""
    _doing: tuple[str, float] | None = None

    def enter(self, state: str) -> None:
        """`state` begins now, and what was going on ends."""
        now = self.clock()
        if self._doing is not None:
            before, since = self._doing
            if before == "training":
                self.steps.append(now - since)
            elif before == "saving":
                self.slowest_save = max(self.slowest_save, now - since)
        self._doing = (state, now)

    def over(self) -> bool:
        """Whether the stop has to begin: what is left is less than two saves, three steps and the margin."""
        now = self.clock()
        if self.exit_at is not None and now >= self.exit_at:
            return True
        running = [now - self._doing[1]] if self._doing is not None and self._doing[0] == "training" else []
        needed = 2 * self.slowest_save + 3 * max([*self.steps, *running], default=0.0) + MARGIN
        return self.job_end is not None and self.job_end - now < needed


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """When SLURM will end this job, in seconds since the epoch; None outside a job, and where SLURM does not say."""
    job = environ.get("SLURM_JOB_ID")
    if not job:
        return None
    with suppress(OSError, subprocess.SubprocessError, ValueError, LookupError):
        command = ("squeue", "-h", "-j", job, "-o", "%e")
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return time.mktime(time.strptime(done.stdout.split()[0][:19], "%Y-%m-%dT%H:%M:%S"))
    return None
