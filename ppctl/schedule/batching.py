"""The pass behind batched messages: neighbouring messages of a rank start together and are waited for together.

Knows where in both ends' lists a message goes. Must not know policies, transports or why messages are batched.
Standard library only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from ppctl.schedule.action import (
    BACKWARDS,
    MESSAGES,
    PASSED_ON,
    Action,
    B,
    Channel,
    F,
    I,
    Op,
    Placement,
    Schedule,
    W,
    lane,
)
from ppctl.schedule.executor import Execution
from ppctl.schedule.repetition import rounds, stretched
from ppctl.schedule.simulate import Costs, run_of

_Rule = Callable[[Op, Op], bool]
"""Whether a message that the first operation makes moves after the second one, which comes next on its rank."""

_LEFT = 4
"""Rounds of one microbatch that a shortened schedule keeps: enough for what is repeated to have settled."""

_RULES: tuple[tuple[bool, _Rule], ...] = (
    (True, lambda made, then: False),
    (False, lambda made, then: made is F and then is not F),
    (False, lambda made, then: True),
)
"""The choices that are tried: whether a backward has its price or a forward's in the order of events, and the rule."""


class Prices(NamedTuple):
    """Seconds of a forward and a whole backward of any stage, and of a message."""

    forward: float
    backward: float
    message: float


def batch_messages(schedule: Schedule, prices: Prices) -> Schedule:
    """Add gradient sync, and every message to both ends' lists, at one moment of a common order of events.

    The events are those of a simulation without limits, in which a message has some moment between the end of what
    makes it and the start of what uses it. All lists follow the one order. That gives the two ranks of a pair the same
    sequence, and it excludes a deadlock: of the events that are not over the first one can always go on, and to start a
    message together with later ones only lets it go earlier. Several choices of the moments are tried at `prices`; the
    fastest one stays. It has no pairs: for a batch the whole rank waits, whichever half needs the message. Raises
    ScheduleError if the schedule hangs.
    """
    schedule = replace(schedule, pairs=frozenset())
    for size in sorted({1, schedule.placement.pp}):
        if (batched := _from_fewer(schedule, prices, size)) is not None:
            return batched
    return place_gradient_sync(min(_tried(schedule, prices), key=itemgetter(0))[1])


def _from_fewer(schedule: Schedule, prices: Prices, size: int) -> Schedule | None:
    """The batched schedule that follows from those of fewer rounds of `size` microbatches; None if none does."""
    out = rounds(schedule, size) - (_LEFT if size == 1 else 2)
    if out < 2:
        return None
    few = stretched(schedule, size, -out)
    settled = _settled(few.name, few.placement, few.num_microbatches, few.actions, size, prices)
    if not settled:
        return None
    _, longer = min(settled, key=lambda each: each[0][0] + (out - 1) * each[0][1])
    return stretched(longer, size, out - 1)


@lru_cache(64)
def _settled(
    name: str, placement: Placement, count: int, actions: tuple[tuple[Action, ...], ...], size: int, prices: Prices
) -> list[tuple[tuple[float, float], Schedule]]:
    """For each of the rules the seconds of one round more than these `actions` and of that round, and its schedule.

    Empty unless the round makes every list of every choice longer by the round before it: only then each further round
    does, too, and takes as many seconds. Remembered, as it is the same for any number of rounds.
    """
    few = Schedule(name, placement, count, actions)
    settled = []
    for (before, one), (after, other) in zip(_tried(few, prices), _tried(stretched(few, size, 1), prices), strict=True):
        if one.capacities != other.capacities or rounds(one, size) < 2:
            return []
        if stretched(one, size, 1).actions != other.actions:
            return []
        settled.append(((after, after - before), place_gradient_sync(other)))
    return settled


_Tried = list[tuple[float, Schedule]]
"""The batched schedule of each of the rules, without gradient sync, and the seconds that it takes."""


def _tried(schedule: Schedule, prices: Prices) -> _Tried:
    stages = schedule.placement.num_stages
    runs = {
        priced: run_of(schedule, Costs.uniform(stages, prices.forward, backward, prices.message))
        for priced, backward in ((True, prices.backward), (False, prices.forward))
    }
    return [_placed(schedule, runs[priced], rule, prices) for priced, rule in _RULES]


def place_gradient_sync(schedule: Schedule) -> Schedule:
    """REDUCE_GRAD of every stage right after its last backward, and after the messages that follow it."""
    rows: list[tuple[Action, ...]] = []
    for row in schedule.actions:
        last = {action.stage: index for index, action in enumerate(row) if action.op in BACKWARDS}
        synced = list(row)
        for index, stage in sorted(((index, stage) for stage, index in last.items()), reverse=True):
            while index + 1 < len(row) and row[index + 1].op in MESSAGES:
                index += 1  # what a neighbour waits for goes first
            synced.insert(index + 1, Action(Op.REDUCE_GRAD, stage))
        rows.append(tuple(synced))
    return replace(schedule, actions=tuple(rows))


class _Row:
    """The list of one rank as it grows: when its last operation ends, and when the last message since then is over."""

    __slots__ = ("actions", "clock", "through")

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.clock = self.through = 0.0


class _Line:
    """One channel's messages on their way into both ends' lists, and how many were received before their use.

    `free_at` says when the last message of the two ranks in this direction was over, whichever channel's it was.
    """

    __slots__ = ("channel", "first", "free_at", "most", "posted", "source", "target")

    def __init__(self, channel: Channel, rows: Sequence[_Row], free_at: list[float]) -> None:
        self.channel, self.free_at = channel, free_at
        self.source, self.target = rows[channel.source], rows[channel.target]
        self.posted = self.most = self.first = 0

    def move(self, send: Action, receive: Action, seconds: float) -> None:
        """Put a message into the lists. It starts when both ends have ended what stands before their batch."""
        source, target, free_at = self.source, self.target, self.free_at
        source.actions.append(send)
        target.actions.append(receive)
        self.posted += 1
        if self.posted > self.most:
            self.most = self.posted
            self.first = self.first or len(target.actions)
        free_at[0] = at = max(source.clock, target.clock, free_at[0]) + seconds
        source.through, target.through = max(source.through, at), max(target.through, at)


_Route = tuple[_Line, Sequence[Action], Sequence[Action], list[float]]
"""The line of an edge, its sends and receives by microbatch, and when each message is used."""


def _placed(schedule: Schedule, run: Execution, deferred: _Rule, prices: Prices) -> tuple[float, Schedule]:
    """The batched schedule of one choice, and the seconds that it takes.

    A message moves at once, or if `deferred(what makes it, what comes then)` holds and nothing stands idle between
    the two, after what comes then, if it is not needed before.
    """
    rows, free_at = [_Row() for _ in schedule.actions], defaultdict[tuple[int, int], list[float]](lambda: [0.0])
    lines = {edge.channel: _Line(edge.channel, rows, free_at[edge.channel[:2]]) for edge in schedule.edges}
    seconds = dict.fromkeys((I, W), prices.backward / 2) | {F: prices.forward, B: prices.backward}
    goes, comes = _routes(schedule, run, lines)
    times: list[float] = []
    moved: list[tuple[_Line, Action, Action]] = []
    computed: list[tuple[_Row, Action, float, _Line | None]] = []
    for own, row, starts, ends in zip(rows, schedule.actions, run.starts, run.ends, strict=True):
        last = len(row) - 1
        computed += [(own, action, seconds[action[0]], comes[action[0]][action[1]]) for action in row]
        for index, (op, stage, mb) in enumerate(row):
            if (route := goes[op][stage]) is not None:
                line, sends, receives, needed = route
                at = ends[index]
                if index < last and starts[index + 1] <= at and deferred(op, row[index + 1][0]):
                    at = min(ends[index + 1], needed[mb])
                times.append(at)
                moved.append((line, sends[mb], receives[mb]))
    times += chain.from_iterable(run.starts)
    # A message stands before what starts at the same time: sorting leaves what is equal in its order.
    for number in sorted(range(len(times)), key=times.__getitem__):
        if number < len(moved):
            line, send, receive = moved[number]
            line.move(send, receive, prices.message)
        else:
            own, action, took, used = computed[number - len(moved)]
            own.actions.append(action)
            own.clock = max(own.clock, own.through) + took
            if used is not None:
                used.posted -= 1
    capacities = {
        line.channel: 2 * line.most - 1
        for line in sorted(lines.values(), key=lambda line: (line.channel.target, line.first))
        if line.most
    }
    actions = tuple(tuple(own.actions) for own in rows)
    return max(own.clock for own in rows), replace(schedule, actions=actions, batched=True, capacities=capacities)


def _routes(
    schedule: Schedule, run: Execution, lines: Mapping[Channel, _Line]
) -> tuple[dict[Op, list[_Route | None]], dict[Op, list[_Line | None]]]:
    """By operation and stage, where a result goes, and the line by which an input comes; None stands for no edge."""
    count, stages = schedule.num_microbatches, schedule.placement.num_stages
    begun = [[[0.0] * count for _ in range(stages)] for _ in range(2)]
    for row, starts in zip(schedule.actions, run.starts, strict=True):
        for (op, stage, mb), start in zip(row, starts, strict=True):
            if op in PASSED_ON:
                begun[op is F][stage][mb] = start
    goes: dict[Op, list[_Route | None]] = {op: [None] * stages for op in Op}
    comes: dict[Op, list[_Line | None]] = {op: [None] * stages for op in Op}
    for edge in schedule.edges:
        messages = lane(edge.send, edge.sender, count), lane(edge.receive, edge.receiver, count)
        for op in edge.ops:
            goes[op][edge.sender] = (lines[edge.channel], *messages, begun[op is F][edge.receiver])
            comes[op][edge.receiver] = lines[edge.channel]
    return goes, comes
