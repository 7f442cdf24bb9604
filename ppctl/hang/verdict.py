"""The failure of a job without progress: which rank waits for which, for which rank all wait in the end, and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ppctl.plan import Plan
from ppctl.records.rank_records import EXCHANGING_AXES, NO_ACTION, RankFailure, RankState
from ppctl.schedule.action import INPUT_GRADIENTS, MESSAGES, SENDS, Action, Op, Pair, Schedule, input_gradient_of
from ppctl.topology import RankGrid

_LISTED = ("training", "evaluating", "generating")
_ORDER = (
    *("starting", "warming up", "loading", "loading kernels", "training", "updating", "recording"),
    *("evaluating", "saving", "generating", "done"),
)


def published_states(hosts: Mapping[str, Mapping[str, Any]], now: float, silence: float) -> list[RankState]:
    """The states of all ranks; those of a host that has published nothing since `now - silence` count as stopped."""
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
    """The last action that the rank completed."""
    current: Action | None = None
    beside: Action | None = None
    """The backward paired with the forward `current`, if both are running; else None."""
    needs: Action | None = None
    """The action of rank `on` for which it waits."""
    on: int | None = None
    """The rank for which it waits; None if that is unknown, or if it waits for none."""
    sent: bool = False
    """Whether rank `on` has sent the message: then only the message is missing."""
    axis: str | None = None
    """The parallel axis of the exchange in which it waits for rank `on`; None if it waits for a message."""


def waits(plan: Plan, states: Iterable[RankState]) -> tuple[Wait, ...]:
    """The Wait of every rank, in the order of ranks."""
    by_rank = {state.rank: state for state in states if state.rank < plan.sizes.world}
    return tuple(_wait(plan, by_rank, state) for _, state in sorted(by_rank.items()))


def root(rank_waits: Sequence[Wait]) -> Wait | None:
    """The Wait of the rank for which all others wait in the end; None without ranks. Candidates, best first: stopped
    ranks, ends of chains of waits, ranks within an action (a W for which no rank waits), ranks that wait for none; of
    equals the one with the oldest state. A circle of waits ends at the wait for a sent message: both ends wait, so the
    message is lost between them. (A sender that computes or is stopped may not have delivered it.)"""
    if not rank_waits:
        return None
    by_rank = {wait.state.rank: wait for wait in rank_waits}
    ends = {_follow(by_rank, wait).state.rank for wait in rank_waits if wait.on is not None}
    candidates = (
        [wait for wait in rank_waits if wait.state.stopped]
        or [by_rank[rank] for rank in ends]
        or [wait for wait in rank_waits if wait.on is None and wait.current is not None]
        or [wait for wait in rank_waits if wait.on is None]
        or list(rank_waits)
    )
    return min(candidates, key=lambda wait: (wait.state.since, wait.state.rank))


def _follow(by_rank: Mapping[int, Wait], wait: Wait) -> Wait:
    """The end of the chain from `wait`; in a circle the wait for a sent message, else the one that closes it."""
    seen: list[Wait] = []
    while wait.on is not None and wait.on in by_rank and wait not in seen:
        seen.append(wait)
        wait = by_rank[wait.on]
    circle = seen[seen.index(wait) :] if wait in seen else []
    return next((each for each in circle if each.sent), wait)


def _wait(plan: Plan, by_rank: Mapping[int, RankState], own: RankState) -> Wait:
    """A rank's Wait: for a rank in a collective, or for the action of another rank that its action needs."""
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
    if current.op in SENDS:  # a send completes when the other end has received it
        received = _is_past(plan, schedule, other, own, needs)
        return Wait(own, done, current) if received else Wait(own, done, current, None, needs, owner)
    send = Action(Op.SEND_F if needs.op is Op.F else Op.SEND_B, needs.stage, needs.mb)
    return Wait(own, done, current, None, needs, owner, _is_past(plan, schedule, other, own, send))


def _behind_in_exchanges(plan: Plan, by_rank: Mapping[int, RankState], own: RankState) -> tuple[str | None, int | None]:
    """(axis, the rank along it that has started fewest exchanges) for the first axis along which a rank has started
    fewer than `own`; (None, None) if there is no such axis."""
    for axis, started, others in _exchanging(plan, by_rank, own):
        behind = min(others, key=lambda other: (other.exchanges[started], other.rank), default=own)
        if behind.exchanges[started] < own.exchanges[started]:
            return axis, behind.rank
    return None, None


def _exchanging(
    plan: Plan, by_rank: Mapping[int, RankState], own: RankState
) -> Iterator[tuple[str, int, list[RankState]]]:
    """(axis, its index in `exchanges`, the other ranks along it) for each axis along which `own` has exchanged."""
    for place, axis in enumerate(EXCHANGING_AXES):
        if own.exchanges[place] and getattr(plan.sizes, axis) > 1:
            group = RankGrid(plan.sizes).group_of(axis, own.rank)
            yield axis, place, [by_rank[rank] for rank in group if rank != own.rank and rank in by_rank]


def same_exchange(plan: Plan, rank_waits: Sequence[Wait], culprit: Wait) -> tuple[str, tuple[int, ...]] | None:
    """(axis, ranks along it) if all these ranks are in the action of `culprit` and have started the same exchanges.

    Then no rank computes: if one did, the others would have gone on to the next exchange."""
    own = culprit.state
    if culprit.current is None or culprit.current.op is Op.REDUCE_GRAD or not own.working:
        return None
    by_rank = {wait.state.rank: wait.state for wait in rank_waits}
    for axis, _, others in _exchanging(plan, by_rank, own):
        alike = [other for other in others if _at(other) == _at(own)]
        if alike and len(alike) == len(others) == getattr(plan.sizes, axis) - 1:
            return axis, tuple(sorted([own.rank, *(other.rank for other in alike)]))
    return None


def _at(state: RankState) -> tuple[object, ...]:
    return state.state, state.step, state.index, state.working, state.stopped, state.exchanges


def _beside(schedule: Schedule, row: Sequence[Action], index: int) -> Action | None:
    """The backward that runs beside the action at `index`, if the two are a pair."""
    two = row[index : index + 2]
    return two[1] if len(two) == 2 and Pair(*two) in schedule.pairs else None


def _unreceived_send(
    plan: Plan, by_rank: Mapping[int, RankState], own: RankState, schedule: Schedule, row: Sequence[Action]
) -> Action | None:
    """The first send of a rank that has not been received: at the end of its list a rank waits for all its messages."""
    for action in row:
        needs = _need(schedule, action) if action.op in SENDS else None
        if needs is not None:
            other = by_rank.get(_peer(plan, own.rank, schedule.placement.rank_of(needs.stage)))
            if other is not None and not _is_past(plan, schedule, other, own, needs):
                return action
    return None


def schedule_of(plan: Plan, state: RankState) -> Schedule:
    """The schedule that a rank runs in a state: in training its step's (the batch may grow), else forwards alone."""
    return plan.at_step(state.step).schedule if state.state == "training" else plan.forward_schedule


def _need(schedule: Schedule, action: Action) -> Action | None:
    """The action of another stage for which `action` waits: the one that makes its input or, for a send, uses the
    message. None if it waits for no other stage."""
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


def _peer(plan: Plan, rank: int, pp_rank: int) -> int:
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
    """The rank with the least progress, for which `own` waits in a collective; None if no rank is behind `own`."""

    def progress(other: RankState) -> tuple[int, int, int]:
        return other.step, _order(other), other.index

    last = min(by_rank.values(), key=lambda other: (progress(other), other.since, other.rank))
    return last.rank if progress(last) < progress(own) else None


STILL, DEAD_EDGE, FREES = "PP-E706", "PP-E707", "PP-E822"
_ROWS = 32


def verdict(plan: Plan, states: Sequence[RankState], still: float, now: float) -> RankFailure:
    """The failure of the rank for which all wait, after `still` seconds without progress. `now` is on the clock of the
    states, of which there is at least one."""
    rank_waits = waits(plan, states)
    culprit = root(rank_waits)
    assert culprit is not None  # the caller passes at least one state
    code, message = STILL, _message(rank_waits, culprit, still)
    if (
        culprit.on is None
        and not culprit.state.stopped
        and (same := same_exchange(plan, rank_waits, culprit)) is not None
    ):
        message = _no_exchange(*same, rank_waits, still)
    if culprit.sent and culprit.on is not None and not culprit.state.stopped:  # else its state is old
        by_rank = {wait.state.rank: wait.state for wait in rank_waits}
        code, message = DEAD_EDGE, _dead_edge(culprit, by_rank[culprit.on], still)
    return RankFailure(
        rank=culprit.state.rank,
        message=message,
        type="Hang",
        code=code,
        stage=None if culprit.current is None else culprit.current.stage,
        action=None if culprit.current is None else str(culprit.current),
        place="\n".join(_row(wait, now) for wait in rank_waits[:_ROWS]),
        host=culprit.state.host,
    )


def _message(rank_waits: Sequence[Wait], culprit: Wait, still: float) -> str:
    own, waiting = culprit.state, [wait for wait in rank_waits if wait.on is not None]
    nothing = f"nothing has moved for {still:.0f} s"
    if own.stopped:
        return f"{nothing}, and this rank's process is stopped, or its host {own.host} does not answer"
    states = {(wait.state.state, wait.state.step) for wait in rank_waits}
    if not waiting and len(rank_waits) > 1 and len(states) == 1 and culprit.current is None:
        return f"{nothing}, and all ranks wait in the same collective: a connection between two of them may be dead"
    ranks = (
        f"{len(waiting)} of {len(rank_waits)} ranks wait for this one in the end"
        if waiting
        else "this rank has stood still the longest"
    )
    ranks += _along(waiting, own.rank)
    beside = f"; it runs {culprit.current} beside {culprit.beside}" if culprit.beside is not None else ""
    return f"{nothing}, and {ranks}" + (f" (it is on {own.host})" if own.host else "") + _at_once(rank_waits) + beside


def _at_once(rank_waits: Sequence[Wait]) -> str:
    """The message's part on several ranks that compute and wait for no rank: their devices may wait for each other."""
    computing = [str(wait.state.rank) for wait in rank_waits if wait.on is None and wait.current and wait.state.working]
    if len(computing) < 2:
        return ""
    ranks = ", ".join(computing[:_ROWS])
    return f"; ranks {ranks} compute at once: on GPUs their allocators may wait for each other ({FREES})"


def _along(waiting: Sequence[Wait], rank: int) -> str:
    by_axis: dict[str, list[str]] = {}
    for wait in waiting:
        if wait.axis is not None and wait.on == rank:
            by_axis.setdefault(wait.axis, []).append(str(wait.state.rank))
    return "".join(
        f", {'rank' if len(ranks) == 1 else 'ranks'} {', '.join(ranks)} in an exchange along {axis}"
        for axis, ranks in by_axis.items()
    )


def _no_exchange(axis: str, ranks: Sequence[int], rank_waits: Sequence[Wait], still: float) -> str:
    states = {wait.state.rank: wait.state for wait in rank_waits}
    all_of = " and ".join(f"{rank}{_on(states[rank])}" for rank in ranks)
    ends = f"ranks {all_of} have all started the same collective along {axis}, but it does not end"
    return f"nothing has moved for {still:.0f} s: {ends}; a connection between two of them may be dead"


def _dead_edge(culprit: Wait, sender: RankState, still: float) -> str:
    own = culprit.state
    ends = f"rank {sender.rank}{_on(sender)} does not reach rank {own.rank}{_on(own)}"
    return f"{ends}: {culprit.needs} was sent but has not come for {still:.0f} s, and both are alive"


def _on(state: RankState) -> str:
    return f" on {state.host}" if state.host else ""


def _row(wait: Wait, now: float) -> str:
    own = wait.state
    where = f"in {wait.current}" if wait.current is not None else own.state
    where += f" beside {wait.beside}" if wait.beside is not None else ""
    last = f", after {wait.done}" if wait.done is not None else ""
    on = ", stopped or gone" if own.stopped else ""
    if wait.on is not None:
        sent = ", which was sent" if wait.sent else ""
        on += f", waits for rank {wait.on}" + (f" ({wait.needs}{sent})" if wait.needs is not None else "")
        on += f" in an exchange along {wait.axis}" if wait.axis is not None else ""
    return f"rank {own.rank}: step {own.step + 1}, {where}{last}, for {max(0.0, now - own.since):.0f} s{on}"
