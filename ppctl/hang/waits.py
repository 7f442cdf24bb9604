"""Which rank waits for which, and which one all wait for in the end, by the ranks' states and the plan.

Knows what every action of a list needs, and which states are collective. Must not know processes, clocks or files.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppctl.plan import Plan
from ppctl.rank_records import EXCHANGING_AXES, NO_ACTION, RankState
from ppctl.schedule.action import INPUT_GRADIENTS, MESSAGES, SENDS, Action, Op, Pair, Schedule, input_gradient_of
from ppctl.topology import RankGrid

_LISTED = ("training", "evaluating", "generating")
_ORDER = (
    *("starting", "warming up", "loading", "loading kernels", "training", "updating", "recording"),
    *("evaluating", "saving", "generating", "done"),
)


def published_states(hosts: Mapping[str, Mapping[str, Any]], now: float, silence: float) -> list[RankState]:
    """The states of all ranks in what `hosts` published; stopped where a host has not published for `silence` seconds.

    `now` is in seconds since the epoch, as the hosts' own times are.
    """
    states = []
    for host, record in hosts.items():
        silent = now - float(record.get("time", now)) > silence
        for row in record.get("ranks", ()):
            state = RankState.from_json(row, host)
            states.append(replace(state, stopped=state.stopped or silent))
    return states


@dataclass(frozen=True, slots=True)
class Wait:
    """What one rank does, and which rank it waits for."""

    state: RankState
    done: Action | None = None
    """The last action that it completed."""
    current: Action | None = None
    beside: Action | None = None
    """The backward of a pair whose forward is `current`, where both compute."""
    needs: Action | None = None
    """The action of another rank that it waits for."""
    on: int | None = None
    """The rank that it waits for; None if that is not known, or if it waits for none."""
    sent: bool = False
    """Whether that rank has sent the message: then only the message is missing."""
    axis: str | None = None
    """The axis along which both exchange something, where it waits for no message."""


def waits(plan: Plan, states: Iterable[RankState]) -> tuple[Wait, ...]:
    """For every rank which rank it waits for, in the order of ranks."""
    by_rank = {state.rank: state for state in states if state.rank < plan.sizes.world}
    return tuple(_wait(plan, by_rank, state) for _, state in sorted(by_rank.items()))


def root(found: Sequence[Wait]) -> Wait | None:
    """The rank that all other ranks wait for in the end: stopped, or waiting for none, or for a message that was sent.

    Of several, one within an action (a W that nobody waits for) before those that are through their lists, and of these
    the one whose state is the oldest. A message that was sent and does not come while both ends wait (for
    each other, in the end) is lost between them: a sender that computes, or is stopped, may not have delivered it.
    """
    if not found:
        return None
    by_rank = {wait.state.rank: wait for wait in found}
    ends = {_follow(by_rank, wait).state.rank for wait in found if wait.on is not None}
    candidates = (
        [wait for wait in found if wait.state.stopped]
        or [by_rank[rank] for rank in ends]
        or [wait for wait in found if wait.on is None and wait.current is not None]
        or [wait for wait in found if wait.on is None]
        or list(found)
    )
    return min(candidates, key=lambda wait: (wait.state.since, wait.state.rank))


def _follow(by_rank: Mapping[int, Wait], wait: Wait) -> Wait:
    """The end of a chain of waits; of a circle the wait for a message that was sent, else the one that closes it."""
    seen: list[Wait] = []
    while wait.on is not None and wait.on in by_rank and wait not in seen:
        seen.append(wait)
        wait = by_rank[wait.on]
    circle = seen[seen.index(wait) :] if wait in seen else []
    return next((each for each in circle if each.sent), wait)


def _wait(plan: Plan, by_rank: Mapping[int, RankState], own: RankState) -> Wait:
    if own.index == NO_ACTION or own.state not in _LISTED:
        axis, behind = _behind_in_exchanges(plan, by_rank, own)
        return Wait(own, on=_furthest_behind(by_rank, own) if behind is None else behind, axis=axis)
    schedule = schedule_of(plan, own)
    row = schedule.actions[plan.for_rank(own.rank).pp_rank]
    done = next((action for action in reversed(row[: own.index]) if action.op not in MESSAGES), None)
    current = row[own.index] if own.index < len(row) else _unreceived_send(plan, by_rank, own, schedule, row)
    if current is None:
        return Wait(own, done)
    if own.working:
        axis, behind = _behind_in_exchanges(plan, by_rank, own)
        return Wait(own, done, current, _beside(schedule, row, own.index), on=behind, axis=axis)
    needs = _need(schedule, current)
    owner = None if needs is None else _peer(plan, own.rank, schedule.placement.rank_of(needs.stage))
    other = None if owner in (None, own.rank) else by_rank.get(owner)
    if needs is None or other is None:
        return Wait(own, done, current)
    if current.op in SENDS:  # complete when the other end has received it
        received = _is_past(plan, schedule, other, own, needs)
        return Wait(own, done, current) if received else Wait(own, done, current, None, needs, owner)
    return Wait(own, done, current, None, needs, owner, _is_past(plan, schedule, other, own, _send_of(needs)))


def _behind_in_exchanges(plan: Plan, by_rank: Mapping[int, RankState], own: RankState) -> tuple[str | None, int | None]:
    """(axis, the rank along it that has started the fewest exchanges), where these are fewer than its own."""
    for axis, started, others in _exchanging(plan, by_rank, own):
        behind = min(others, key=lambda other: (other.exchanges[started], other.rank), default=own)
        if behind.exchanges[started] < own.exchanges[started]:
            return axis, behind.rank
    return None, None


def _exchanging(
    plan: Plan, by_rank: Mapping[int, RankState], own: RankState
) -> Iterator[tuple[str, int, list[RankState]]]:
    """(axis, its place in `exchanges`, the other ranks along it) of the axes along which `own` exchanged something."""
    for place, axis in enumerate(EXCHANGING_AXES):
        if own.exchanges[place] and getattr(plan.sizes, axis) > 1:
            group = RankGrid(plan.sizes).group_of(axis, own.rank)
            yield axis, place, [by_rank[rank] for rank in group if rank != own.rank and rank in by_rank]


def same_exchange(plan: Plan, found: Sequence[Wait], culprit: Wait) -> tuple[str, tuple[int, ...]] | None:
    """(axis, ranks along it) where all of them are in the action of `culprit` and have started the same exchanges.

    A rank that computes would be behind the others: they go on to the next exchange.
    """
    own = culprit.state
    if culprit.current is None or culprit.current.op is Op.REDUCE_GRAD or not own.working:
        return None
    by_rank = {wait.state.rank: wait.state for wait in found}
    for axis, _, others in _exchanging(plan, by_rank, own):
        alike = [other for other in others if _at(other) == _at(own)]
        if alike and len(alike) == len(others) == getattr(plan.sizes, axis) - 1:
            return axis, tuple(sorted([own.rank, *(other.rank for other in alike)]))
    return None


def _at(state: RankState) -> tuple[object, ...]:
    return state.state, state.step, state.index, state.working, state.stopped, state.exchanges


def _beside(schedule: Schedule, row: Sequence[Action], index: int) -> Action | None:
    """What runs beside the action at `index`: the backward behind it, if the two are a pair."""
    two = row[index : index + 2]
    return two[1] if len(two) == 2 and Pair(*two) in schedule.pairs else None


def _unreceived_send(
    plan: Plan, by_rank: Mapping[int, RankState], own: RankState, schedule: Schedule, row: Sequence[Action]
) -> Action | None:
    """At the end of its list a rank waits until all its messages are received: its first send that is not, yet."""
    for action in row:
        needs = _need(schedule, action) if action.op in SENDS else None
        if needs is not None:
            other = by_rank.get(_peer(plan, own.rank, schedule.placement.rank_of(needs.stage)))
            if other is not None and not _is_past(plan, schedule, other, own, needs):
                return action
    return None


def schedule_of(plan: Plan, state: RankState) -> Schedule:
    """The schedule that a rank runs in a state: of the step's size, where the batch grows."""
    return plan.at_step(state.step).schedule if state.state == "training" else plan.forward_schedule


def _need(schedule: Schedule, action: Action) -> Action | None:
    """The other stage's action that one waits for: it makes the input, or, for a send, uses the message."""
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


def _send_of(made: Action) -> Action:
    """The action that sends the result of `made`."""
    return Action(Op.SEND_F if made.op is Op.F else Op.SEND_B, made.stage, made.mb)


def _peer(plan: Plan, rank: int, pp_rank: int) -> int:
    """The rank at `pp_rank` of the pipeline that `rank` belongs to."""
    return RankGrid(plan.sizes).group_of("pp", rank)[pp_rank]


def _is_past(plan: Plan, schedule: Schedule, other: RankState, own: RankState, action: Action) -> bool:
    """Whether `other` has completed an action of the step that `own` is in."""
    if (other.step, other.state) != (own.step, own.state):
        return (other.step, _order(other)) > (own.step, _order(own))
    if other.index == NO_ACTION:
        return False
    return action in schedule.actions[plan.for_rank(other.rank).pp_rank][: other.index]


def _order(state: RankState) -> int:
    return _ORDER.index(state.state)


def _furthest_behind(by_rank: Mapping[int, RankState], own: RankState) -> int | None:
    """The rank that `own` waits for outside the list, in a collective: the one that is furthest behind."""

    def progress(other: RankState) -> tuple[int, int, int]:
        return other.step, _order(other), other.index

    last = min(by_rank.values(), key=lambda other: (progress(other), other.since, other.rank))
    return last.rank if progress(last) < progress(own) else None
