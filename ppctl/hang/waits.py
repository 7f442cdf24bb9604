"""Who keeps whom waiting: the ranks' records and the plan in, the one that is waited for in the end out.

Knows what every action of a list needs, and which states are collective. Must not know processes, clocks or files: a
record says since when a rank has been where it is, on a clock that the caller knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ppctl.heartbeat import NO_ACTION
from ppctl.plan import Plan
from ppctl.schedule.action import INPUT_GRADIENTS, MESSAGES, SENDS, Action, Op, Schedule, input_gradient_of
from ppctl.topology import RankGrid

_LISTED = ("training", "evaluating", "generating")
_ORDER = (
    *("starting", "warming up", "loading", "training", "updating", "evaluating", "saving", "generating"),
    "done",
)


class Standing(NamedTuple):
    """Where a rank is."""

    rank: int
    state: str
    step: int
    at: int
    """Index of the action in its list, whose length behind it; -1 outside the list."""
    since: float
    """When it got there, in seconds."""
    working: bool = False
    """Whether the action has the message that it needs."""
    gone: bool = False
    """Whether its process is stopped, or its host has fallen silent."""
    host: str = ""


def published(hosts: Mapping[str, Mapping[str, Any]], now: float, silence: float) -> list[Standing]:
    """The standings in what hosts have published; one that has said nothing for `silence` seconds is gone."""
    return [
        Standing(
            *(int(row["rank"]), str(row["state"]), int(row["step"]), int(row["index"]), float(row["since"])),
            working=bool(row.get("working")),
            gone=bool(row.get("stopped")) or now - float(record.get("time", now)) > silence,
            host=host,
        )
        for host, record in hosts.items()
        for row in record.get("ranks", ())
    ]


@dataclass(frozen=True, slots=True)
class Wait:
    """One row of the picture: where a rank is, what it did last, and whom it waits for."""

    standing: Standing
    done: Action | None = None
    current: Action | None = None
    needs: Action | None = None
    """What it waits for, if that is another rank's."""
    on: int | None = None
    """The rank that it waits for; None: nobody, as far as can be known."""
    sent: bool = False
    """Whether that rank has sent it: then it waits for the message alone."""


def waits(plan: Plan, standings: Iterable[Standing]) -> tuple[Wait, ...]:
    """For every rank whom it waits for, by rank."""
    by_rank = {standing.rank: standing for standing in standings}
    return tuple(_wait(plan, by_rank, standing) for _, standing in sorted(by_rank.items()))


def root(found: Sequence[Wait]) -> Wait | None:
    """The rank that all others wait for in the end: it is gone, or waits for nobody, or for a message that was sent.

    Of several, the one that has stood longest. A message that was sent and does not come while both ends wait (for each
    other, in the end) is lost between them: a sender that computes, or is stopped, may not have got to it.
    """
    if not found:
        return None
    by_rank = {wait.standing.rank: wait for wait in found}
    ends = {_follow(by_rank, wait).standing.rank for wait in found if wait.on is not None}
    candidates = (
        [wait for wait in found if wait.standing.gone]
        or [by_rank[rank] for rank in ends]
        or [wait for wait in found if wait.on is None]
        or list(found)
    )
    return min(candidates, key=lambda wait: (wait.standing.since, wait.standing.rank))


def _follow(by_rank: Mapping[int, Wait], wait: Wait) -> Wait:
    """The end of a chain of waits; of a circle its message that was sent, else whoever closes it."""
    seen: list[Wait] = []
    while wait.on is not None and wait.on in by_rank and wait not in seen:
        seen.append(wait)
        wait = by_rank[wait.on]
    circle = seen[seen.index(wait) :] if wait in seen else []
    return next((each for each in circle if each.sent), wait)


def _wait(plan: Plan, by_rank: Mapping[int, Standing], standing: Standing) -> Wait:
    if standing.at == NO_ACTION or standing.state not in _LISTED:
        return Wait(standing, on=_behind(by_rank, standing))
    schedule = schedule_of(plan, standing.state)
    row = schedule.actions[plan.for_rank(standing.rank).pp_rank]
    done = next((action for action in reversed(row[: standing.at]) if action.op not in MESSAGES), None)
    current = row[standing.at] if standing.at < len(row) else _under_way(plan, by_rank, standing, schedule, row)
    if current is None:
        return Wait(standing, done)
    needs = None if standing.working else _need(schedule, current)
    owner = None if needs is None else _peer(plan, standing.rank, schedule.placement.rank_of(needs.stage))
    other = None if owner in (None, standing.rank) else by_rank.get(owner)
    if needs is None or other is None:
        return Wait(standing, done, current)
    if current.op in SENDS:  # over once the other end has taken it
        taken = _is_past(plan, schedule, other, standing, needs)
        return Wait(standing, done, current) if taken else Wait(standing, done, current, needs, owner)
    return Wait(standing, done, current, needs, owner, _is_past(plan, schedule, other, standing, _sending(needs)))


def _under_way(
    plan: Plan, by_rank: Mapping[int, Standing], standing: Standing, schedule: Schedule, row: Sequence[Action]
) -> Action | None:
    """Behind its list a rank waits until all it sent is taken: its first send that, as far as is known, is not."""
    for action in row:
        needs = _need(schedule, action) if action.op in SENDS else None
        if needs is not None:
            other = by_rank.get(_peer(plan, standing.rank, schedule.placement.rank_of(needs.stage)))
            if other is not None and not _is_past(plan, schedule, other, standing, needs):
                return action
    return None


def schedule_of(plan: Plan, state: str) -> Schedule:
    """The schedule that a rank runs in a state."""
    return plan.schedule if state == "training" else plan.forward_schedule


def _need(schedule: Schedule, action: Action) -> Action | None:
    """What another stage computes for an action: what it works on, or what it makes of what is sent to it."""
    op, stage, mb = action
    last = schedule.placement.num_stages - 1
    if op in (Op.F, Op.RECV_F):
        return Action(Op.F, stage - 1, mb) if stage > 0 else None
    if op is Op.SEND_F:
        return Action(Op.F, stage + 1, mb)
    if op is Op.SEND_B:
        return input_gradient_of(stage - 1, mb, schedule)
    if op in INPUT_GRADIENTS or op is Op.RECV_B:
        return input_gradient_of(stage + 1, mb, schedule) if stage < last else None
    return None


def _sending(made: Action) -> Action:
    """The action that sends what `made` makes."""
    return Action(Op.SEND_F if made.op is Op.F else Op.SEND_B, made.stage, made.mb)


def _peer(plan: Plan, rank: int, pp_rank: int) -> int:
    """The rank at `pp_rank` of the pipeline that `rank` belongs to."""
    return RankGrid(plan.sizes).group_of("pp", rank)[pp_rank]


def _is_past(plan: Plan, schedule: Schedule, other: Standing, own: Standing, action: Action) -> bool:
    """Whether `other` is past an action of the step that `own` is in."""
    if (other.step, other.state) != (own.step, own.state):
        return (other.step, _order(other)) > (own.step, _order(own))
    if other.at == NO_ACTION:
        return False
    return action in schedule.actions[plan.for_rank(other.rank).pp_rank][: other.at]


def _order(standing: Standing) -> int:
    return _ORDER.index(standing.state)


def _behind(by_rank: Mapping[int, Standing], standing: Standing) -> int | None:
    """Outside the list ranks meet in collectives: whoever is furthest behind is waited for."""

    def progress(other: Standing) -> tuple[int, int, int]:
        return other.step, _order(other), other.at

    least = min(by_rank.values(), key=lambda other: (progress(other), other.since, other.rank))
    return least.rank if progress(least) < progress(standing) else None
