"""How long nothing may move, by what a job is doing, and whether that is over.

Knows the limits of a config and what records say. Must not know clocks or processes: a caller says what time it is.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from ppctl.config.quantities import seconds
from ppctl.config.schema import LaunchConfig
from ppctl.hang.waits import Standing

LEAST, TIMES = 120.0, 10.0
"""The adaptive limit of a step: so many times the slowest one so far, and at least so many seconds."""
GRACE = float(os.environ.get("PPCTL_ALARM_GRACE", "60"))
"""Seconds by which a rank's own alarm is later than what the watch allows."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for which nothing may move, by what the job is doing."""

    start: float
    first_step: float
    step: float | None
    """None adapts: `TIMES` the slowest step so far, at least `LEAST`, at most `longest`."""

    @classmethod
    def of(cls, launch: LaunchConfig) -> Limits:
        """The limits of a config that has been checked."""
        step = None if launch.step_limit is None else float(seconds(launch.step_limit))
        return cls(seconds(launch.start_limit), seconds(launch.first_step_limit), step)

    @property
    def longest(self) -> float:
        """The longest that nothing may move, whatever the job is doing. The watch ends the job then at the latest."""
        return max(self.start, self.first_step, LEAST if self.step is None else self.step)

    @property
    def of_groups(self) -> timedelta:
        """How long a process group waits for its other ranks before its backend gives up.

        Later than the watch, which names a culprit, and than every rank's alarm, which writes its stacks: what the
        backends say names neither.
        """
        return timedelta(seconds=self.longest + 2 * GRACE)

    @property
    def look(self) -> float:
        """Seconds between publications of a node's records: under a short limit a live node must not seem silent."""
        return min(10.0, (self.step or LEAST) / 4)


class Progress:
    """Watches one life of a job: `late` says when nothing has moved for too long."""

    def __init__(self, limits: Limits, now: float, first_step: int = 0) -> None:
        self.limits = limits
        self._first = first_step
        self._began = now
        self._step = -1
        self._entered = now
        self._slowest = 0.0

    def late(self, standings: Sequence[Standing], now: float) -> float | None:
        """Seconds since anything moved, if that is longer than allowed; else None."""
        self.note(standings)
        if not standings or all(standing.state == "done" for standing in standings):
            return None
        moved = max(self._began, *(standing.since for standing in standings))
        still = now - moved
        return still if still > self.limit(standings) else None

    def limit(self, standings: Sequence[Standing]) -> float:
        """What holds now."""
        states = {standing.state for standing in standings}
        if states & {"starting", "warming up", "loading"}:
            return self.limits.start
        if self._step <= self._first or states & {"saving", "evaluating", "generating", "done"}:
            return self.limits.first_step
        if self.limits.step is not None:
            return self.limits.step
        return min(self.limits.longest, max(LEAST, TIMES * self._slowest))

    def note(self, standings: Sequence[Standing]) -> None:
        """Note when a step begins, and how long the one before took (its start-up does not count)."""
        trained = [standing for standing in standings if standing.state == "training"]
        newest = max((standing.step for standing in trained), default=-1)
        if newest > self._step:
            began = min(standing.since for standing in trained if standing.step == newest)
            if self._step >= 0:
                self._slowest = max(self._slowest, (began - self._entered) / (newest - self._step))
            self._step, self._entered = newest, began
