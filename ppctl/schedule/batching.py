"""The pass behind batched messages: neighbouring messages of a rank start together and are waited for together.

Knows where in both ends' lists a message goes. Must not know policies, transports or why messages are batched.
Standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, pairwise

from ppctl.schedule.action import Action, Channel, Edge, Op, Schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import Span, step_time


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


def _placed(schedule: Schedule, spans: tuple[Span, ...], deferred: Callable[[Action, Action], bool]) -> Schedule:
    """The batched schedule of one choice.

    A message moves at once, or if `deferred(what makes it, what comes then)` holds and nothing stands idle between
    the two, after what comes then, if it is not needed before.
    """
    place = schedule.placement
    edges = {(op, edge.sender): edge for edge in schedule.edges for op in edge.ops}
    starts = {span.action: span.start for span in spans}
    then = {before.action: after for before, after in pairwise(spans) if before.pp_rank == after.pp_rank}

    def moment(span: Span, edge: Edge) -> float:
        following = then.get(span.action)
        if following is None or following.start > span.end or not deferred(span.action, following.action):
            return span.end
        users = (Action(op, edge.receiver, span.action.mb) for op in edge.ops)
        return min(following.end, next(starts[user] for user in users if user in starts))

    events: list[tuple[float, int, int, tuple[Action, ...]]] = []
    for number, span in enumerate(spans):
        events.append((span.start, 1, number, (span.action,)))
        if (edge := edges.get(span.action[:2])) is not None:
            mb = span.action.mb
            message = Action(edge.send, edge.sender, mb), Action(edge.receive, edge.receiver, mb)
            events.append((moment(span, edge), 0, number, message))
    rows: list[list[Action]] = [[] for _ in schedule.actions]
    for *_, actions in sorted(events):
        for action in actions:
            rows[place.rank_of(action.stage)].append(action)
    batched = replace(schedule, actions=tuple(map(tuple, rows)), batched=True)
    return replace(batched, capacities=_least_capacities(batched))


def _least_capacities(schedule: Schedule) -> dict[Channel, int]:
    """The least capacities whose receive slots hold what the lists receive before it is used."""
    receives = {(edge.receive, edge.receiver): edge.channel for edge in schedule.edges}
    uses = {(op, edge.receiver): edge.channel for edge in schedule.edges for op in edge.ops}
    posted: Counter[Channel] = Counter()
    most: dict[Channel, int] = {}
    for op, stage, _ in chain.from_iterable(schedule.actions):
        if (channel := receives.get((op, stage))) is not None:
            posted[channel] += 1
            most[channel] = max(most.get(channel, 0), posted[channel])
        elif (used := uses.get((op, stage))) is not None:
            posted[used] -= 1
    return {channel: 2 * slots - 1 for channel, slots in most.items()}
