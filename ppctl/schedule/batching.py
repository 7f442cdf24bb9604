"""The pass behind batched messages: neighbouring messages of a rank start together and are waited for together.

Schedules of regular policies repeat a round of microbatches in the middle, again and again: batched is a short one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from operator import and_, eq, is_, itemgetter, sub

from ppctl.errors import ScheduleError
from ppctl.schedule.action import (
    BACKWARDS,
    COMPUTE,
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
    new_action,
)
from ppctl.schedule.executor import Execution
from ppctl.schedule.simulate import Costs, run_of

Repetition = list[tuple[int, int, int]]
"""Where each list's repetition begins, how many rounds it has one after another, and how many actions a round has."""


def repetition(schedule: Schedule, size: int) -> Repetition:
    """How every rank's list repeats a round of `size` microbatches."""
    return [_repeated(row, size, schedule.num_microbatches) for row in schedule.actions]


def rounds(found: Repetition) -> int:
    """How many rounds every list has one after another; 0 if some list repeats nothing."""
    return min(number for _, number, _ in found)


def shorter(schedule: Schedule) -> Schedule | None:
    """The schedule with fewer rounds of which this one is `stretched`; None elsewhere, and in other processes."""
    return vars(schedule).get("_shorter")


def remember(schedule: Schedule, short: Schedule) -> None:
    """Let `shorter` return `short` for a schedule. It is no field, so that it is not compared, sent or copied."""
    vars(schedule)["_shorter"] = short


def stretched(schedule: Schedule, size: int, more: int, found: Repetition | None = None) -> Schedule:
    """The schedule with so many rounds of `size` microbatches more in its middle, or fewer, if `more` is negative.
    Every list must have `rounds`, more of them than are left out. It must have no pairs."""
    rows: list[tuple[Action, ...]] = []
    count = schedule.num_microbatches + more * size
    for row, (begin, _, length) in zip(schedule.actions, found or repetition(schedule, size), strict=True):
        one = [(lane(op, stage, count), mb) for op, stage, mb in row[begin : begin + length]] if more > 0 else []
        again = [actions[mb + time * size] for time in range(more) for actions, mb in one]
        rest = row[begin - min(more, 0) * length :]
        later = [new_action((op, stage, mb + more * size if mb >= 0 else mb)) for op, stage, mb in rest]
        rows.append((*row[:begin], *again, *later))
    longer = replace(schedule, actions=tuple(rows), num_microbatches=count)
    if more > 0:
        remember(longer, schedule)
    return longer


def _repeated(row: Sequence[Action], size: int, count: int) -> tuple[int, int, int]:
    ops, stages, mbs = zip(*row, strict=True) if row else ((), (), ())
    length = size * mbs.count(count // 2)
    same = map(and_, map(is_, ops[length:], ops), map(eq, stages[length:], stages))
    alike = bytes(map(and_, same, map(size.__eq__, map(sub, mbs[length:], mbs))))
    run = max(alike.split(b"\0"), key=len)
    return alike.find(run), len(run) // length + 1 if len(run) >= length > 0 else 0, length


_Actions = tuple[tuple[Action, ...], ...]
_Alike = tuple[str, Placement, int]
"""What schedules with other numbers of microbatches have alike: name, placement, frozen stages."""
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


FORWARD_SECONDS, BACKWARD_SECONDS, MESSAGE_SECONDS = 1.0, 2.0, 0.125
"""The prices at which capacities and batches are chosen: every stage alike, messages that are short but not free."""
_SECONDS = {F: FORWARD_SECONDS, B: BACKWARD_SECONDS, I: BACKWARD_SECONDS / 2, W: BACKWARD_SECONDS / 2}


def batch_messages(schedule: Schedule) -> Schedule:
    """Add gradient sync, and every message to both ends' lists, at one moment of a common order of events.

    The events are those of a simulation without limits, in which a message has some moment between the end of what
    makes it and the start of what uses it. All lists follow the one order. That gives the two ranks of a pair the same
    sequence, and it excludes a deadlock: of the events that are not over the first one can always go on, and to start a
    message together with later ones only lets it go earlier. Several choices of the moments are tried; the fastest one
    stays. It has no pairs: for a batch the whole rank waits, whichever half needs the message. Raises ScheduleError if
    the schedule hangs.
    """
    alike = schedule.name, schedule.placement, schedule.frozen_stages
    return _batched(alike, schedule.num_microbatches, schedule.actions)


@lru_cache(16)
def _batched(alike: _Alike, count: int, actions: _Actions) -> Schedule:
    schedule = _schedule(alike, count, actions)
    for size in sorted({1, schedule.placement.pp}):
        found = repetition(schedule, size)
        out = rounds(found) - (_LEFT if size == 1 else 2)
        if out > 1:
            few, more = (stretched(schedule, size, left - out, found) for left in (0, 1))
            choices = _settled(alike, few.num_microbatches, few.actions, more.actions, size)
            seconds = [all_ + (out - 1) * of_round for all_, of_round, _ in choices]
            if choices:
                batched = stretched(choices[seconds.index(min(seconds))][2], size, out - 1)
                if tuple(tuple(a for a in row if a[0] in COMPUTE) for row in batched.actions) == actions:
                    return batched
    return place_gradient_sync(min(_tried(schedule), key=itemgetter(0))[1])


_Settled = list[tuple[float, float, Schedule]]
"""The batched schedules of all choices of a round more: seconds, those of the round, and the schedule."""


@lru_cache(64)
def _settled(alike: _Alike, count: int, actions: _Actions, more: _Actions, size: int) -> _Settled:
    """What the choices come to with `more` actions, those of a round of `size` microbatches. Empty unless the round
    makes every list of every choice longer by the round before it: only then each further round does, too, and takes as
    many seconds."""
    settled = _Settled()
    try:
        two = _schedule(alike, count, actions), _schedule(alike, count + size, more)
        choices = zip(*map(_tried, two), strict=True)
    except ScheduleError:
        return []
    for (before, one), (after, other) in choices:
        if one.capacities != other.capacities or rounds(repetition(one, size)) < 2:
            return []
        if stretched(one, size, 1).actions != other.actions:
            return []
        settled.append((after, after - before, place_gradient_sync(other)))
    return settled


def forget() -> None:
    """Forget the schedules that were batched before, so that the next ones take as long as in a new process."""
    _batched.cache_clear()
    _settled.cache_clear()


def _schedule(alike: _Alike, count: int, actions: _Actions) -> Schedule:
    name, placement, frozen_stages = alike
    return Schedule(name, placement, count, actions, frozen_stages=frozen_stages)


def _tried(schedule: Schedule) -> list[tuple[float, Schedule]]:
    """The seconds that each of the choices takes, and its batched schedule without gradient sync."""
    stages = schedule.placement.num_stages
    runs = {
        priced: run_of(schedule, Costs.uniform(stages, FORWARD_SECONDS, backward, MESSAGE_SECONDS))
        for priced, backward in ((True, BACKWARD_SECONDS), (False, FORWARD_SECONDS))
    }
    return [_placed(schedule, runs[priced], rule) for priced, rule in _RULES]


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
    """One channel's messages on their way into both ends' lists, and how many were received before their use. `free_at`
    says when the last message of the two ranks in this direction was over, whichever channel's it was."""

    __slots__ = ("channel", "first", "free_at", "most", "posted", "source", "target")

    def __init__(self, channel: Channel, rows: Sequence[_Row], free_at: list[float]) -> None:
        self.channel, self.free_at = channel, free_at
        self.source, self.target = rows[channel.source], rows[channel.target]
        self.posted = self.most = self.first = 0

    def move(self, send: Action, receive: Action) -> None:
        """Put a message into the lists. It starts when both ends have ended what stands before their batch."""
        source, target, free_at = self.source, self.target, self.free_at
        source.actions.append(send)
        target.actions.append(receive)
        self.posted += 1
        if self.posted > self.most:
            self.most = self.posted
            self.first = self.first or len(target.actions)
        free_at[0] = at = max(source.clock, target.clock, free_at[0]) + MESSAGE_SECONDS
        source.through, target.through = max(source.through, at), max(target.through, at)


_Route = tuple[_Line, Sequence[Action], Sequence[Action], list[float]]
"""The line of an edge, its sends and receives by microbatch, and when each message is used."""


def _placed(schedule: Schedule, run: Execution, deferred: _Rule) -> tuple[float, Schedule]:
    """The batched schedule of one choice, and the seconds that it takes. A message moves at once, or if `deferred(what
    makes it, what comes then)` holds and nothing stands idle between the two, after what comes then, if it is not
    needed before."""
    rows, free_at = [_Row() for _ in schedule.actions], defaultdict[tuple[int, int], list[float]](lambda: [0.0])
    lines = {edge.channel: _Line(edge.channel, rows, free_at[edge.channel[:2]]) for edge in schedule.edges}
    goes, comes = _routes(schedule, run, lines)
    times: list[float] = []
    moved: list[tuple[_Line, Action, Action]] = []
    computed: list[tuple[_Row, Action, float, _Line | None]] = []
    for own, row, starts, ends in zip(rows, schedule.actions, run.starts, run.ends, strict=True):
        last = len(row) - 1
        computed += [(own, action, _SECONDS[action[0]], comes[action[0]][action[1]]) for action in row]
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
            line.move(send, receive)
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
