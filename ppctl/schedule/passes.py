"""Schedule -> Schedule: from compute-only schedules to the lists that ranks execute.

`lower` places gradient sync and messages, receives ahead of need, and gives every channel its capacity.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from ppctl.errors import Problem, ScheduleError
from ppctl.schedule.action import (
    COMPUTE,
    FORWARDS,
    INPUT_GRADIENTS,
    MESSAGES,
    PASSED_ON,
    WEIGHT_GRADIENTS,
    Action,
    Channel,
    I,
    Op,
    Pair,
    Schedule,
    W,
    grouped,
    lane,
    receive_slots,
    send_slots,
)
from ppctl.schedule.batching import (
    BACKWARD_SECONDS,
    FORWARD_SECONDS,
    MESSAGE_SECONDS,
    batch_messages,
    place_gradient_sync,
    remember,
    shorter,
)
from ppctl.schedule.executor import order_of, remember_order
from ppctl.schedule.pairs import in_halves
from ppctl.schedule.simulate import Costs, simulate


def lower(schedule: Schedule, *, capacity: int | None = None, batched: bool = False) -> Schedule:
    """Add gradient synchronisation, messages and capacities to a compute-only schedule.

    Every channel gets `capacity`, by default what `least_capacities` finds; a `batched` schedule (`batch_messages`)
    ignores it. Raises ScheduleError for a capacity below 1, for a schedule that is already lowered and, if capacities
    have to be found, for one that deadlocks.
    """
    if not COMPUTE.issuperset(op for row in schedule.actions for op, _, _ in row):
        raise ScheduleError(Problem("PP-E307", f"schedule {schedule.name} is lowered already"))
    if batched:
        return batch_messages(schedule)
    if capacity is None:
        return add_messages(place_gradient_sync(schedule), least_capacities(schedule))
    if capacity < 1:
        message = f"a channel of capacity {capacity} carries nothing: its receiver must be able to post one receive"
        raise ScheduleError(Problem("PP-E308", message, "pipeline.p2p_capacity=1"))
    channels = (line.channel for line in _routes(schedule, _in_lists(schedule)).lines)
    return add_messages(place_gradient_sync(schedule), dict.fromkeys(channels, capacity))


def without_frozen(schedule: Schedule, frozen_stages: int) -> Schedule:
    """The schedule without actions that its first `frozen_stages` stages do not need: their backwards, their sums of
    gradients, and messages of gradients to them. In a lowered schedule all other actions keep their places, so that
    frozen stages run no further ahead. It stays sound: the other actions wait for less, and channels lose the same
    messages at both ends.
    """
    if not frozen_stages:
        return schedule
    place = schedule.placement

    def stays(action: Action) -> bool:
        op, stage, _ = action
        if op in (Op.SEND_B, Op.RECV_B):
            return stage + (op is Op.RECV_B) > frozen_stages
        return stage >= frozen_stages or op in FORWARDS

    rows = tuple(tuple(filter(stays, row)) for row in schedule.actions)
    used = {place.channel(action) for row in rows for action in row if action.op in MESSAGES}
    capacities = {channel: size for channel, size in schedule.capacities.items() if channel in used}
    pairs = frozenset(pair for pair in schedule.pairs if stays(pair.backward))
    kept = replace(schedule, actions=rows, capacities=capacities, pairs=pairs, frozen_stages=frozen_stages)
    if (order := order_of(schedule)) is not None:
        remember_order(kept, tuple(filter(stays, order)))
    if (short := shorter(schedule)) is not None:
        remember(kept, without_frozen(short, frozen_stages))
    return kept


def run_weights_sooner(schedule: Schedule, most: int) -> Schedule:
    """The compute-only schedule with at most `most` weight gradients deferred on a rank. When an I would exceed this,
    the oldest W runs right after the I, or after the pair of which the I is the last action: while an I runs, `most`
    Ws may wait. All other actions keep their order, and each stage's Ws have the order of its Is."""
    return replace(schedule, actions=tuple(_weights_sooner(row, most) for row in schedule.actions))


def _weights_sooner(row: Sequence[Action], most: int) -> tuple[Action, ...]:
    """The list of a rank with at most `most` Ws deferred at any time."""
    owed: deque[Action] = deque()
    ordered: list[Action] = []
    for action in row:
        if action[0] is not W:
            ordered.append(action)
        elif action in owed:
            owed.remove(action)
            ordered.append(action)
        if action[0] is I:
            owed.append(action._replace(op=W))
            if len(owed) > most:
                ordered.append(owed.popleft())
    return tuple(ordered)


def split_before_late_weights(schedule: Schedule) -> Schedule:
    """The compute-only schedule in which no stage's last input gradient is in a B that comes before a W of the stage:
    such a B becomes an I and a W right after it. A wrapper that sums gradients over replicas at each parameter's last
    gradient then finds the last ones in one action, or in the last I and the last W, never in a B with deferred
    gradients still to come.
    """
    late: list[Action] = []
    for row in schedule.actions:
        last, final = ({a.stage: a for a in row if a.op in ops} for ops in (INPUT_GRADIENTS, WEIGHT_GRADIENTS))
        late += [each for stage, each in last.items() if each.op is Op.B and final[stage] is not each]
    return in_halves(schedule, late)


def add_messages(schedule: Schedule, capacities: Mapping[Channel, int]) -> Schedule:
    """Put SEND right after the action that makes the message, and RECV where it can first be of use.

    A channel keeps at most `receive_slots(capacity)` receives posted: this many at first, then a further one whenever a
    message has been used. Receives are posted in the order of the sends, whatever the order of use. None is posted
    before its rank has run the last action that the message depends on (`_first_of_use`), because no message can arrive
    earlier. On a GPU a posted receive is a running kernel: the first launch of another kernel and a retry of the
    allocator wait until the device is idle, and so for the message. No message is placed between the actions of a pair.
    """
    routes = _routes(schedule, _in_lists(schedule))
    slots = {line.channel: receive_slots(capacities[line.channel]) for line in routes.lines}
    ready = _first_of_use(schedule, routes)
    rows: list[tuple[Action, ...]] = []
    for pp_rank, row in enumerate(schedule.actions):
        ends = {
            line.channel: _ReceivingEnd(slots[line.channel], deque(line.sent))
            for line in routes.lines
            if line.channel.target == pp_rank
        }
        full = [receive for end in ends.values() for receive in end.post(ready, -1)]
        index = -1
        for each in grouped(row, schedule.pairs):
            actions = each if isinstance(each, Pair) else (each,)
            index += len(actions)
            full += actions
            for op, stage, mb in actions:
                if (goes := routes.goes.get((op, stage))) is not None:
                    full.append(goes.sends[mb])
                if (comes := routes.comes.get((op, stage))) is not None:
                    ends[comes.line.channel].free += 1
            for end in ends.values():
                if end.free and end.due:
                    full.extend(end.post(ready, index))
        rows.append(tuple(full))
    return replace(schedule, actions=tuple(rows), capacities=dict(capacities))


@dataclass(slots=True)
class _ReceivingEnd:
    """A channel's receives while they are added to a rank's list: free slots, and receives still to be posted."""

    free: int
    due: deque[Action]

    def post(self, ready: Mapping[Action, int], index: int) -> Iterator[Action]:
        """Take and yield the receives that are posted after the action with this index (-1: in front of the list)."""
        while self.free and self.due and ready[self.due[0]] <= index:
            self.free -= 1
            yield self.due.popleft()


def _first_of_use(schedule: Schedule, routes: _Routes) -> dict[Action, int]:
    """Receive -> the index of the last action of its rank's list that the message depends on; -1 for none.

    The message depends on everything that its sender has used before, also for other microbatches: in 1F1B the first
    gradient comes after the sender's warm-up, which needs as many activations of this rank. And it depends on its own
    microbatch: an activation on the forward of the rank's previous stage, a gradient on its next stage's backward.
    """
    place = schedule.placement
    timed = ((index, *action) for row in schedule.actions for index, action in enumerate(row))
    made = {(op is Op.F, stage, mb): index for index, op, stage, mb in timed if op in PASSED_ON}
    beside = dict[tuple[bool, int], int]()
    for before, after in (pair for pp_rank in range(place.pp) for pair in pairwise(place.stages_of(pp_rank))):
        beside[True, after], beside[False, before] = before, after
    ready: dict[Action, int] = {}
    for row in schedule.actions:
        used: dict[int, int] = {}
        for op, stage, mb in row:
            ahead = op is Op.F
            if (comes := routes.comes.get((op, stage))) is not None:
                source = comes.line.channel.source
                used[source] = max(used.get(source, -1), made.get((ahead, stage - 1 if ahead else stage + 1, mb), -1))
            if (goes := routes.goes.get((op, stage))) is not None:
                receive = goes.receives[mb]
                own = made.get((ahead, beside.get((ahead, receive.stage), -1), mb), -1)
                ready[receive] = max(own, used.get(goes.line.channel.target, -1))
    return ready


def least_capacities(schedule: Schedule) -> dict[Channel, int]:
    """For every channel the smallest capacity at which nothing waits longer than it would without a limit. That is: in
    a simulation of the compute-only schedule without limits (at the prices of `batching`), no send would have to wait
    for an older one, and no message would come later than it is needed. The work is linear in the schedule's length for
    each capacity tried; few are, since they double until one suffices. Raises ScheduleError if the schedule hangs.
    """
    timed = ((action, start, end) for _, action, start, end in simulate(schedule, _costs(schedule)).spans)
    return {line.channel: _least_capacity(line) for line in _routes(schedule, timed).lines}


@dataclass(slots=True, eq=False)
class _ChannelMessages:
    """A channel's messages, as RECVs in the order of sends and of use, with the simulated times of both."""

    channel: Channel
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


class _Route(NamedTuple):
    """One edge of the model in one direction: its line, which edges may share, and its messages by microbatch."""

    line: _ChannelMessages
    sends: Sequence[Action]
    receives: Sequence[Action]


class _Routes(NamedTuple):
    """(operation, stage) -> the routes of its input and of its result; and the lines."""

    comes: dict[tuple[Op, int], _Route]
    goes: dict[tuple[Op, int], _Route]
    lines: list[_ChannelMessages]


def _routes(schedule: Schedule, timed: Iterable[tuple[Action, float, float]]) -> _Routes:
    """The routes of a schedule, with the messages that the `timed` actions (action, start, end) send and use."""
    count = schedule.num_microbatches
    lines: dict[Channel, _ChannelMessages] = {}
    routes = _Routes({}, {}, [])
    for edge in schedule.edges:
        line = lines.setdefault(edge.channel, _ChannelMessages(edge.channel))
        route = _Route(line, lane(edge.send, edge.sender, count), lane(edge.receive, edge.receiver, count))
        for op in edge.ops:
            routes.goes[op, edge.sender] = routes.comes[op, edge.receiver] = route
    for (op, stage, mb), start, end in timed:
        if (goes := routes.goes.get((op, stage))) is not None:
            goes.line.sent.append(goes.receives[mb])
            goes.line.sent_at.append(end)
        if (comes := routes.comes.get((op, stage))) is not None:
            comes.line.used.append(comes.receives[mb])
            comes.line.needed_at.append(start)
            comes.line.used_at.append(end)
    return routes._replace(lines=[line for line in lines.values() if line.sent])


def _in_lists(schedule: Schedule) -> Iterator[tuple[Action, float, float]]:
    """All actions in the order of the lists, without times."""
    return ((action, 0.0, 0.0) for row in schedule.actions for action in row)


def _costs(schedule: Schedule) -> Costs:
    return Costs.uniform(schedule.placement.num_stages, FORWARD_SECONDS, BACKWARD_SECONDS, MESSAGE_SECONDS)


def _least_capacity(line: _ChannelMessages) -> int:
    deadlines = line.deadlines()
    enough = 3  # enough for most channels
    while not _in_time(line, deadlines, enough):
        enough *= 2
    tried = range(2 if enough == 3 else enough // 2 + 1, enough)
    return tried.start + bisect_left(tried, True, key=lambda capacity: _in_time(line, deadlines, capacity))


def _in_time(line: _ChannelMessages, deadlines: list[float], capacity: int) -> bool:
    """Whether at this capacity no send waits for an older one, and every message is there when it is needed. Message n
    starts once it is sent, message n - 1 is delivered, and its receive is posted: at the start, or when the use of
    message n - `receive_slots` has ended."""
    receives, sends = receive_slots(capacity), send_slots(capacity)
    posted_at = [0.0] * receives + line.used_at
    through: list[float] = []
    at = 0.0
    for number, (sent, posted, deadline) in enumerate(zip(line.sent_at, posted_at, deadlines, strict=False)):
        if number >= sends and through[number - sends] > sent:
            return False
        at = max(at, sent, posted) + MESSAGE_SECONDS
        if at > deadline:
            return False
        through.append(at)
    return True
