"""When a job hangs, and who keeps whom waiting: the ranks' records and the plan in, the one that is waited for out.

Knows what every action of a list needs, which states are collective, and how long nothing may move. Must not know
processes, clocks or files: a record says since when a rank has been where it is, on a clock that the caller knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppctl.config.durations import seconds
from ppctl.config.schema import LaunchConfig
from ppctl.heartbeat import NO_ACTION, STATES
from ppctl.plan import Plan
from ppctl.schedule.action import MESSAGES, Action, Op, Schedule, backward_of

CODE = "PP-E706"
LEAST, TIMES = 120.0, 10.0
"""The adaptive limit of a step: so many times the slowest one so far, and at least so many seconds."""

_LISTED = ("training", "evaluating", "generating")


class Standing(NamedTuple):
    """Where a rank is."""

    rank: int
    state: str
    step: int
    at: int
    """Index of the action in its list; -1 outside the list."""
    since: float
    """When it got there, in seconds."""


@dataclass(frozen=True, slots=True)
class Wait:
    """One row of the picture: where a rank is, what it did last, and whom it waits for."""

    standing: Standing
    done: Action | None
    current: Action | None
    needs: Action | None
    """What it waits for, if that is another rank's."""
    on: int | None
    """The rank that it waits for; None: nobody, as far as can be known."""


def waits(plan: Plan, standings: Iterable[Standing]) -> tuple[Wait, ...]:
    """For every rank whom it waits for, by rank."""
    by_rank = {standing.rank: standing for standing in standings}
    return tuple(_wait(plan, by_rank, standing) for _, standing in sorted(by_rank.items()))


def root(found: Sequence[Wait]) -> Wait | None:
    """The rank that all others wait for in the end: it waits for nobody. Of several, the one that has stood longest."""
    if not found:
        return None
    by_rank = {wait.standing.rank: wait for wait in found}
    ends = {_follow(by_rank, wait).standing.rank for wait in found if wait.on is not None}
    candidates = [by_rank[rank] for rank in ends] or [wait for wait in found if wait.on is None] or list(found)
    return min(candidates, key=lambda wait: (wait.standing.since, wait.standing.rank))


def _follow(by_rank: Mapping[int, Wait], wait: Wait) -> Wait:
    seen = set()
    while wait.on is not None and wait.on in by_rank and wait.standing.rank not in seen:
        seen.add(wait.standing.rank)
        wait = by_rank[wait.on]
    return wait


def _wait(plan: Plan, by_rank: Mapping[int, Standing], standing: Standing) -> Wait:
    if standing.at == NO_ACTION or standing.state not in _LISTED:
        return Wait(standing, None, None, None, _behind(by_rank, standing))
    schedule = schedule_of(plan, standing.state)
    row = schedule.actions[plan.for_rank(standing.rank).pp_rank]
    if not 0 <= standing.at < len(row):
        return Wait(standing, None, None, None, None)
    current = row[standing.at]
    done = next((action for action in reversed(row[: standing.at]) if action.op not in MESSAGES), None)
    needs = _need(schedule, current)
    if needs is None:
        return Wait(standing, done, current, None, None)
    owner = _peer(plan, standing.rank, schedule.placement.rank_of(needs.stage))
    other = by_rank.get(owner)
    waiting = owner != standing.rank and other is not None and not _has_done(plan, schedule, other, standing, needs)
    return Wait(standing, done, current, needs if waiting else None, owner if waiting else None)


def schedule_of(plan: Plan, state: str) -> Schedule:
    """The schedule that a rank runs in a state."""
    return plan.schedule if state == "training" else plan.forward_schedule


def _need(schedule: Schedule, action: Action) -> Action | None:
    """What another stage must have computed before an action can run: the message that it waits for."""
    op, stage, mb = action
    last = schedule.placement.num_stages - 1
    if op in (Op.F, Op.RECV_F):
        return Action(Op.F, stage - 1, mb) if stage > 0 else None
    if op in (Op.B, Op.I, Op.RECV_B):
        return backward_of(stage + 1, mb, schedule) if stage < last else None
    return None


def _peer(plan: Plan, rank: int, pp_rank: int) -> int:
    """The rank at `pp_rank` of the pipeline that `rank` belongs to."""
    from ppctl.topology import RankGrid

    return RankGrid(plan.sizes).group_of("pp", rank)[pp_rank]


def _has_done(plan: Plan, schedule: Schedule, other: Standing, own: Standing, needs: Action) -> bool:
    """Whether `other` is past an action of the step that `own` is in."""
    if (other.step, STATES.index(other.state)) != (own.step, STATES.index(own.state)):
        return (other.step, _order(other)) > (own.step, _order(own))
    if other.at == NO_ACTION:
        return False
    row = schedule.actions[plan.for_rank(other.rank).pp_rank]
    return needs in row[: other.at]


_ORDER = ("starting", "warming up", "loading", "training", "updating", "evaluating", "saving", "generating", "done")


def _order(standing: Standing) -> int:
    return _ORDER.index(standing.state)


def _behind(by_rank: Mapping[int, Standing], standing: Standing) -> int | None:
    """Outside the list ranks meet in collectives: whoever is furthest behind is waited for."""

    def progress(other: Standing) -> tuple[int, int, int]:
        return other.step, _order(other), other.at

    least = min(by_rank.values(), key=lambda other: (progress(other), other.since, other.rank))
    return least.rank if progress(least) < progress(standing) else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds for which nothing may move, by what the job is doing."""

    start: float
    first_step: float
    step: float | None
    """None adapts: `TIMES` the slowest step so far, at least `LEAST`."""

    @classmethod
    def of(cls, launch: LaunchConfig) -> Limits:
        """The limits of a config that has been checked."""
        step = None if launch.step_limit is None else float(seconds(launch.step_limit))
        return cls(seconds(launch.start_limit), seconds(launch.first_step_limit), step)

    @property
    def look(self) -> float:
        """Seconds between publications of a node's records: under a short limit a live node must not seem silent."""
        return min(10.0, (self.step or LEAST) / 4)


def first_step_of(resume: str | None) -> int:
    """The step that a life of a run begins with: behind the checkpoint that it resumes from."""
    found = re.search(r"step-(\d+)/?$", resume or "")
    return int(found[1]) if found else 0


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
        self._count(standings)
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
        return max(LEAST, TIMES * self._slowest) if self.limits.step is None else self.limits.step

    def _count(self, standings: Sequence[Standing]) -> None:
        """Note when a step begins, and how long the one before took (its start-up does not count)."""
        trained = [standing for standing in standings if standing.state == "training"]
        newest = max((standing.step for standing in trained), default=-1)
        if newest > self._step:
            began = min(standing.since for standing in trained if standing.step == newest)
            if self._step >= 0:
                self._slowest = max(self._slowest, (began - self._entered) / (newest - self._step))
            self._step, self._entered = newest, began


def verdict(
    plan: Plan, standings: Sequence[Standing], still: float, now: float, silent: Collection[int] = ()
) -> dict[str, object]:
    """The error record of the rank that all wait for: what goes into errors/ and into the report.

    Ranks that are `silent`, as nobody heard of their node for long, are it before any other.
    """
    found = waits(plan, standings)
    culprit = root([wait for wait in found if wait.standing.rank in silent] or found)
    assert culprit is not None  # there is a standing, or nothing would be late
    own = culprit.standing
    waiting = [wait for wait in found if wait.on is not None]
    picture = "\n".join(line(wait, now) for wait in found[:32])
    wait_for = f"{len(waiting)} of {len(found)} ranks wait for this one in the end"
    message = f"nothing has moved for {still:.0f} s, and {wait_for if waiting else 'this rank the longest'}"
    return {
        "rank": own.rank,
        "stage": None if culprit.current is None else culprit.current.stage,
        "action": None if culprit.current is None else str(culprit.current),
        "code": CODE,
        "type": "Hang",
        "message": message,
        "place": picture,
        "remedy": "",
        "others": [],
        "traceback": "",
        "exit_code": 1,
    }


def line(wait: Wait, now: float) -> str:
    """One row: where a rank is, since when, and whom it waits for."""
    own = wait.standing
    where = f"in {wait.current}" if wait.current is not None else own.state
    last = f", after {wait.done}" if wait.done is not None else ""
    on = ""
    if wait.on is not None:
        on = f", waits for rank {wait.on}" + (f" ({wait.needs})" if wait.needs is not None else "")
    return f"rank {own.rank}: step {own.step + 1}, {where}{last}, for {max(0.0, now - own.since):.0f} s{on}"
