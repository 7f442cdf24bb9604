"""The pass behind batched messages: neighbouring messages of a rank start together and are waited for together.

Knows where in both ends' lists a message goes. Must not know policies, transports or why somebody wants batches.
Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from ppctl.schedule.action import COMPUTE, INPUT_GRADIENTS, RECEIVES, Action, Channel, Op, Schedule
from ppctl.schedule.simulate import Costs, simulate, step_time
from ppctl.schedule.trace import Span

_USERS = {Op.RECV_F: frozenset({Op.F}), Op.RECV_B: INPUT_GRADIENTS}


def batch_messages(schedule: Schedule, costs: Costs) -> Schedule:
    """Put every message of a compute-only schedule into both ends' lists, at one moment of a common order of events.

    The events are those of a simulation without limits, in which a message has some moment between the end of what
    makes it and the start of what uses it. All lists follow the one order. That gives the two ranks of a pair the same
    sequence, and it excludes a deadlock: of the events that are not over the first one can always go on, and to start a
    message together with later ones only lets it go earlier. Several choices of the moments are tried at `costs`; the
    fastest one stays. It has no pairs: for a batch the whole rank waits, whichever half needs the message. Raises
    ScheduleError if the schedule hangs.
    """
    schedule = replace(schedule, pairs=frozenset())
    even = replace(costs, backward=costs.forward)
    spans = {priced: simulate(schedule, costs if priced else even).spans for priced in (True, False)}
    tried = (
        _placed(schedule, spans[True], lambda made, then: False),
        _placed(schedule, spans[False], lambda made, then: made.op is Op.F and then.op is not Op.F),
        _placed(schedule, spans[False], lambda made, then: True),
    )
    return min(tried, key=lambda one: step_time(simulate(one, costs)))


class _Message(NamedTuple):
    send: Action
    receive: Action


def _message(action: Action, schedule: Schedule) -> _Message | None:
    """The message that an action makes for another rank."""
    op, stage, mb = action
    place = schedule.placement
    if op is Op.F and stage < place.num_stages - 1 and not place.is_local(stage):
        return _Message(Action(Op.SEND_F, stage, mb), Action(Op.RECV_F, stage + 1, mb))
    if op in INPUT_GRADIENTS and schedule.gradient_leaves(stage) and not place.is_local(stage - 1):
        return _Message(Action(Op.SEND_B, stage, mb), Action(Op.RECV_B, stage - 1, mb))
    return None


def _placed(schedule: Schedule, spans: tuple[Span, ...], deferred: Callable[[Action, Action], bool]) -> Schedule:
    """The batched schedule of one choice. A message moves at once, or where `deferred(what makes it, what comes then)`
    holds and nothing stands idle between the two, behind what comes then, if it is not needed before."""
    place = schedule.placement
    starts = {span.action: span.start for span in spans}
    then = {before.action: after for before, after in pairwise(spans) if before.pp_rank == after.pp_rank}

    def moment(span: Span, message: _Message) -> float:
        following = then.get(span.action)
        if following is None or following.start > span.end or not deferred(span.action, following.action):
            return span.end
        _, stage, mb = message.receive
        needed = next(
            start for op in _USERS[message.receive.op] if (start := starts.get(Action(op, stage, mb))) is not None
        )
        return min(following.end, needed)

    events: list[tuple[float, int, int, tuple[Action, ...]]] = []
    for number, span in enumerate(spans):
        events.append((span.start, 1, number, (span.action,)))
        if (message := _message(span.action, schedule)) is not None:
            events.append((moment(span, message), 0, number, message))
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    for *_, actions in sorted(events):
        for action in actions:
            rows[place.rank_of(action.stage)].append(action)
    batched = replace(schedule, actions=tuple(map(tuple, rows)), batched=True)
    return replace(batched, capacities=dict(_capacities(batched)))


def _capacities(schedule: Schedule) -> Iterator[tuple[Channel, int]]:
    """The least capacities whose receive slots hold what the lists receive before it is used."""
    place = schedule.placement
    waiting: Counter[Channel] = Counter()
    most: dict[Channel, int] = {}
    for row in schedule.actions:
        for action in row:
            op, stage, _ = action
            if op in RECEIVES:
                channel = place.channel(action)
                waiting[channel] += 1
                most[channel] = max(most.get(channel, 0), waiting[channel])
            elif op in COMPUTE:
                waiting.subtract(place.channel(Action(r, stage)) for r in _received(op, stage, schedule))
    return ((channel, 2 * slots - 1) for channel, slots in most.items())


def _received(op: Op, stage: int, schedule: Schedule) -> Iterator[Op]:
    """The receive whose message an operation of a stage uses, if there is one."""
    place = schedule.placement
    if op is Op.F and stage > 0 and not place.is_local(stage - 1):
        yield Op.RECV_F
    if op in INPUT_GRADIENTS and stage < place.num_stages - 1 and not place.is_local(stage):
        yield Op.RECV_B
