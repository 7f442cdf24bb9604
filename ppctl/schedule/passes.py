"""Schedule -> Schedule: from what is computed to what every rank executes.

`lower` places gradient sync and messages, receives ahead of need, and gives every channel its capacity. Must not know
policies or configuration: any compute-only schedule will do. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import NamedTuple

from ppctl.errors import Problem, ScheduleError
from ppctl.schedule.action import (
    BACKWARDS,
    COMPUTE,
    Action,
    Channel,
    Op,
    Schedule,
    lane,
    receive_slots,
    send_slots,
)
from ppctl.schedule.simulate import Costs, simulate

FORWARD_SECONDS, BACKWARD_SECONDS, MESSAGE_SECONDS = 1.0, 2.0, 0.125
"""The prices at which capacities are chosen: every stage alike, and messages that are short but not free."""


def lower(schedule: Schedule, *, capacity: int | None = None) -> Schedule:
    """Add to a compute-only schedule all that its ranks need beyond computing: gradient sync, messages, capacities.

    Every channel gets `capacity`, by default what `least_capacities` finds. Raises ScheduleError for a capacity below 1,
    for a schedule that is lowered already and, where capacities are to be found, for one that hangs.
    """
    if any(action.op not in COMPUTE for row in schedule.actions for action in row):
        raise ScheduleError(Problem("PP-E307", f"schedule {schedule.name} is lowered already"))
    if capacity is None:
        return add_messages(place_gradient_sync(schedule), least_capacities(schedule))
    if capacity < 1:
        message = f"a channel of capacity {capacity} carries nothing: its receiver must be able to post one receive"
        raise ScheduleError(Problem("PP-E308", message, "pipeline.p2p_capacity=1"))
    return add_messages(place_gradient_sync(schedule), dict.fromkeys(_sent(schedule), capacity))


def place_gradient_sync(schedule: Schedule) -> Schedule:
    """REDUCE_GRAD of every stage right behind its last backward."""
    rows: list[tuple[Action, ...]] = []
    for row in schedule.actions:
        last = {action.stage: index for index, action in enumerate(row) if action.op in BACKWARDS}
        synced = list(row)
        for index, stage in sorted(((index, stage) for stage, index in last.items()), reverse=True):
            synced.insert(index + 1, Action(Op.REDUCE_GRAD, stage))
        rows.append(tuple(synced))
    return replace(schedule, actions=tuple(rows))


def add_messages(schedule: Schedule, capacities: Mapping[Channel, int]) -> Schedule:
    """Put SEND right behind the action that makes the message, and RECV where the channel's capacity first allows it.

    A channel keeps `receive_slots(capacity)` receives posted: that many at the front of the list, then the next one
    whenever a message has been used. Receives are posted in the order of the sends, whatever the order of use.
    """
    routes = _routes(schedule)
    sent = _sent(schedule)
    slots = {channel: receive_slots(capacities[channel]) for channel in sent}
    later = {channel: iter(receives[slots[channel] :]) for channel, receives in sent.items()}
    rows: list[tuple[Action, ...]] = []
    for pp_rank, row in enumerate(schedule.actions):
        mine = [channel for channel in sent if channel.target == pp_rank]
        full = [receive for channel in mine for receive in sent[channel][: slots[channel]]]
        for action in row:
            full.append(action)
            op, stage, mb = action
            if (goes := routes.goes[op][stage]) is not None:
                full.append(goes.sends[mb])
            if (comes := routes.comes[op][stage]) is not None:
                full.extend(islice(later[comes.channel], 1))
        rows.append(tuple(full))
    return replace(schedule, actions=tuple(rows), capacities=dict(capacities))


def least_capacities(schedule: Schedule) -> dict[Channel, int]:
    """For every channel the smallest capacity at which nothing waits longer than it would without a limit.

    That is: in a simulation of the compute-only schedule without limits (at the prices above), no send would have to wait
    for an older one, and no message would come later than it is needed. Linear in the schedule's length for each capacity
    tried; those are few, since they double until one will do. Raises ScheduleError if the schedule hangs.
    """
    return {channel: _least_capacity(traffic) for channel, traffic in _traffic(schedule).items()}


class _Route(NamedTuple):
    """One edge of the model in one direction: its channel, and its SEND and RECV of every microbatch."""

    channel: Channel
    sends: list[Action]
    receives: list[Action]


class _Routes(NamedTuple):
    """By operation and stage, the route that its input comes by and the route that its result goes by."""

    comes: dict[Op, list[_Route | None]]
    goes: dict[Op, list[_Route | None]]


def _routes(schedule: Schedule) -> _Routes:
    place, count = schedule.placement, schedule.num_microbatches
    ahead: list[_Route | None] = [None]  # entry s leads into stage s
    back: list[_Route | None] = [None]  # entry s leads out of stage s
    for before, after in pairwise(range(place.num_stages)):
        source, target = place.rank_of(before), place.rank_of(after)
        remote = source != target
        down = _Route(Channel(source, target, "F"), lane(Op.SEND_F, before, count), lane(Op.RECV_F, after, count))
        up = _Route(Channel(target, source, "B"), lane(Op.SEND_B, after, count), lane(Op.RECV_B, before, count))
        ahead.append(down if remote else None)
        back.append(up if remote else None)
    nothing: list[_Route | None] = [None] * place.num_stages
    into, out_of = [*back[1:], None], back
    alone = {Op.W: nothing, Op.REDUCE_GRAD: nothing}
    return _Routes(
        {Op.F: ahead, Op.B: into, Op.I: into, **alone},
        {Op.F: [*ahead[1:], None], Op.B: out_of, Op.I: out_of, **alone},
    )


def _sent(schedule: Schedule) -> dict[Channel, list[Action]]:
    """Per channel its messages in the order in which they are sent, each as the RECV that takes it."""
    goes = _routes(schedule).goes
    sent: dict[Channel, list[Action]] = {}
    for row in schedule.actions:
        for op, stage, mb in row:
            if (route := goes[op][stage]) is not None:
                sent.setdefault(route.channel, []).append(route.receives[mb])
    return sent


@dataclass(slots=True)
class _Traffic:
    """A channel's messages in a simulation: when each is sent (in that order), needed and used (in that order)."""

    sent: list[Action] = field(default_factory=list)
    sent_at: list[float] = field(default_factory=list)
    used: list[Action] = field(default_factory=list)
    needed_at: list[float] = field(default_factory=list)
    used_at: list[float] = field(default_factory=list)

    def deadlines(self) -> list[float]:
        """When each message is needed, in the order of the sends."""
        if self.used == self.sent:
            return self.needed_at
        needed = dict(zip(self.used, self.needed_at, strict=True))
        return [needed[message] for message in self.sent]


def _traffic(schedule: Schedule) -> dict[Channel, _Traffic]:
    """Every channel's traffic in a run without limits."""
    routes = _routes(schedule)
    costs = Costs.uniform(schedule.placement.num_stages, FORWARD_SECONDS, BACKWARD_SECONDS, MESSAGE_SECONDS)
    channels: defaultdict[Channel, _Traffic] = defaultdict(_Traffic)
    for _, (op, stage, mb), start, end in simulate(schedule, costs).spans:
        if (goes := routes.goes[op][stage]) is not None:
            traffic = channels[goes.channel]
            traffic.sent.append(goes.receives[mb])
            traffic.sent_at.append(end)
        if (comes := routes.comes[op][stage]) is not None:
            traffic = channels[comes.channel]
            traffic.used.append(comes.receives[mb])
            traffic.needed_at.append(start)
            traffic.used_at.append(end)
    return dict(channels)


def _least_capacity(traffic: _Traffic) -> int:
    deadlines = traffic.deadlines()
    enough = 3  # what most channels need
    while not _in_time(traffic, deadlines, enough):
        enough *= 2
    tried = range(2 if enough == 3 else enough // 2 + 1, enough)
    return tried.start + bisect_left(tried, True, key=lambda capacity: _in_time(traffic, deadlines, capacity))


def _in_time(traffic: _Traffic, deadlines: list[float], capacity: int) -> bool:
    """Whether at this capacity no send waits for an older one, and every message is there when it is needed.

    Message n starts when it is sent, when message n - 1 is through, and when its receive is posted: at the start, or when
    the use of the message `receive_slots` before has ended.
    """
    receives, sends = receive_slots(capacity), send_slots(capacity)
    posted_at = [0.0] * receives + traffic.used_at
    through: list[float] = []
    at = 0.0
    for number, (sent, posted, deadline) in enumerate(zip(traffic.sent_at, posted_at, deadlines, strict=False)):
        if number >= sends and through[number - sends] > sent:
            return False
        at = max(at, sent, posted) + MESSAGE_SECONDS
        if at > deadline:
            return False
        through.append(at)
    return True
