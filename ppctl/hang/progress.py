"""How long a job may stand still in each of its states, and whether it has stood still for longer."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from ppctl.config.quantities import seconds
from ppctl.config.schema import LaunchConfig
from ppctl.plan import Plan
from ppctl.records.rank_records import RankState

LEAST, TIMES = 120.0, 10.0
"""The adaptive limit of a step: `TIMES` the slowest step so far, at least `LEAST` seconds."""
_AS_LONG_AS_A_FIRST_STEP = {"loading kernels", "recording", "saving", "evaluating", "generating", "done"}
GRACE = float(os.environ.get("PPCTL_ALARM_GRACE", "60"))
"""Seconds by which a rank's own alarm is later than the watch's limit."""

MARGIN = 60.0
"""Seconds in addition to saves and steps: SLURM's clock is coarse, and ranks need some time to exit."""
_SLOW_DISK = 100 * 2**20
"""Bytes a second that a rank is assumed to write until a save has been measured."""


def seconds_to_leave(save: float | None, saved_bytes: int, step: float) -> float:
    """Seconds that a job needs to save and end: two saves, three steps and the margin. `save` and `step` are seconds of
    the slowest save and step; if `save` is None, a rank's `saved_bytes` are assumed to go to a slow disk."""
    return 2 * (saved_bytes / _SLOW_DISK if save is None else save) + 3 * step + MARGIN


def time_to_leave(plan: Plan, records: Sequence[Mapping[str, Any]]) -> float:
    """`seconds_to_leave` for a run with these lines of metrics.jsonl; without lines, with the plan's step time."""
    save = max((record["save_s"] for record in records if "save_s" in record), default=None)
    saved = max(cost.weight_bytes + cost.optimizer_bytes for cost in plan.pp_ranks)
    step = max((record.get("step_time_s") or 0.0 for record in records[-10:]), default=0.0) or plan.step_time_s
    return seconds_to_leave(save, saved, step)


@dataclass(frozen=True, slots=True)
class Limits:
    """The most seconds without progress, in each state of the job."""

    start: float
    first_step: float
    step: float | None
    """None for a limit that adapts: `TIMES` the slowest step so far, at least `LEAST`, at most `longest`."""

    @classmethod
    def of(cls, launch: LaunchConfig) -> Limits:
        """The limits of a config that has been checked."""
        step = None if launch.step_limit is None else float(seconds(launch.step_limit))
        return cls(seconds(launch.start_limit), seconds(launch.first_step_limit), step)

    @property
    def longest(self) -> float:
        """The longest of the limits: after this the watch ends any job without progress."""
        return max(self.start, self.first_step, LEAST if self.step is None else self.step)

    @property
    def of_groups(self) -> timedelta:
        """How long a rank waits for the other ranks of a process group before the backend gives up: longer than the
        watch, which names a culprit, and every rank's alarm, which writes stacks. A backend's error does neither."""
        return timedelta(seconds=self.longest + 2 * GRACE)

    @property
    def look(self) -> float:
        """Seconds between publications of a node: short enough that no live node seems silent under a short limit."""
        return min(10.0, (self.step or LEAST) / 4)


class Progress:
    """Follows one start of a job: `late` returns how long there has been no progress, if that is too long."""

    def __init__(self, limits: Limits, now: float, first_step: int = 0) -> None:
        self.limits = limits
        self._first = first_step
        self._began = now
        self._step = -1
        self._entered = now
        self._slowest = 0.0

    def late(self, states: Sequence[RankState], now: float) -> float | None:
        """Seconds without progress if they exceed the limit, else None; also does `note`. `now`: the states' clock."""
        self.note(states)
        if not states or all(each.state == "done" for each in states):
            return None
        still = now - max(self._began, *(each.since for each in states))
        return still if still > self.limit(states) else None

    def limit(self, states: Sequence[RankState]) -> float:
        """The limit for ranks in these states, in seconds."""
        names = {each.state for each in states}
        if names & {"starting", "warming up", "loading"}:
            return self.limits.start
        if self._step <= self._first or names & _AS_LONG_AS_A_FIRST_STEP:
            return self.limits.first_step
        if self.limits.step is not None:
            return self.limits.step
        return min(self.limits.longest, max(LEAST, TIMES * self._slowest))

    def note(self, states: Sequence[RankState]) -> None:
        """Record when a step begins, and how long the one before took (without the start-up before the first step)."""
        training = [each for each in states if each.state == "training"]
        newest = max((each.step for each in training), default=-1)
        if training and newest != self._step:
            began = min(each.since for each in training if each.step == newest)
            if 0 <= self._step < newest:  # not if the run has gone back to an earlier step
                self._slowest = max(self._slowest, (began - self._entered) / (newest - self._step))
            self._step, self._entered = newest, began
