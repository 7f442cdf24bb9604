"""The pass behind batched messages: neighbouring messages of a rank start together and are waited for together.

Schedules of regular policies repeat a round of microbatches in the middle: a short one is batched, then stretched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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
    Schedule,
    W,
    lane,
    new_action,
)
from ppctl.schedule.executor import Execution, in_order, remember_order
from ppctl.schedule.simulate import Costs, run_of

Repetition = list[tuple[int, int, int]]
"""Per list: (the index at which the repetition begins, the number of consecutive rounds, the actions in a round)."""


def repetition(schedule: Schedule, size: int) -> Repetition:
    """How every rank's list repeats a round of `size` microbatches."""
    return [_repeated(row, size, schedule.num_microbatches) for row in schedule.actions]


def rounds(found: Repetition) -> int:
    """How many consecutive rounds every list has; 0 if some list repeats nothing."""
    return min(number for _, number, _ in found)


def shorter(schedule: Schedule) -> Schedule | None:
    """The schedule with fewer rounds from which this one was `stretched`; None for others, and in other processes."""
    return vars(schedule).get("_shorter")


def remember(schedule: Schedule, short: Schedule) -> None:
    """Let `shorter` return `short` for a schedule. It is not a field, so that it is not compared, sent or copied."""
    vars(schedule)["_shorter"] = short


def stretched(schedule: Schedule, size: int, more: int, found: Repetition | None = None) -> Schedule:
    """The schedule with `more` further rounds of `size` microbatches in its middle, or fewer if `more` is negative.
    There must be no pairs, and in every list more rounds than are left out. `shorter` of a longer one is `schedule`."""
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


_LEFT = 4
"""Rounds of one microbatch that a shortened schedule keeps, enough for the repetition to have settled."""

_RULES: tuple[tuple[bool, Set[Op], Set[Op]], ...] = ((True, set(), set()), (False, {F}, {F}), (False, COMPUTE, set()))
"""The choices that are tried: (whether backwards have their own price, not a forward's, in the order of events; the
operations whose messages move behind their rank's next operation; the operations behind which none moves)."""

FORWARD_SECONDS, BACKWARD_SECONDS, MESSAGE_SECONDS = 1.0, 2.0, 0.125
"""The prices for choosing capacities and batches: equal stages, and messages that are short but not free."""
_SECONDS = {F: FORWARD_SECONDS, B: BACKWARD_SECONDS, I: BACKWARD_SECONDS / 2, W: BACKWARD_SECONDS / 2}


def batch_messages(schedule: Schedule) -> Schedule:
    """Add gradient sync, and every message to both ends' lists, at one moment of a common order of events.

    The events are those of a simulation without limits, in which a message has some moment between the end of the
    action that makes it and the start of the action that uses it. All lists follow one order of events. So the two
    ranks of a channel have the same sequence, and no deadlock is possible: the first unfinished event can always go on,
    and starting a message together with later ones only makes it earlier. Several choices of moments are tried; the
    fastest is taken. The result has no pairs: a batch stops the whole rank, whichever half needs the message. Raises
    ScheduleError if the schedule hangs.
    """
    return _batched(replace(schedule, pairs=frozenset()))


@lru_cache(16)
def _batched(schedule: Schedule) -> Schedule:
    count, actions = schedule.num_microbatches, schedule.actions
    for size in sorted({1, schedule.placement.pp}):
        left = _LEFT if size == 1 else 2
        if _repeated(actions[0], size, count)[1] < left + 2:
            continue
        found = repetition(schedule, size)
        out = rounds(found) - left
        if out > 1:
            choices = _settled(stretched(schedule, size, -out, found), size)
            if choices:
                seconds = [all_ + (out - 1) * of_round for all_, of_round, _, _ in choices]
                _, _, order, again = choices[seconds.index(min(seconds))]
                short = shorter(order) or _lists(order)
                remember(order, short)
                batched = _lists(stretched(order, size, out - 1, again), short.capacities)
                remember(batched, short)
                if all(map(eq, actions, (tuple(a for a in row if a[0] in COMPUTE) for row in batched.actions))):
                    return batched
    return _lists(place_gradient_sync(min(_tried(schedule), key=itemgetter(0))[1]))


_Settled = list[tuple[float, float, Schedule, Repetition]]
"""For each choice: (seconds with one further round, seconds of the round, the order of events, its repetition)."""
_Goes = dict[Op, list[tuple[Sequence[Action], list[float]] | None]]
"""By operation and stage, the SENDs of its results and the times of their use, by microbatch; None without an edge."""


@lru_cache(64)
def _settled(few: Schedule, size: int) -> _Settled:
    """Results of the choices with one further round of `size` microbatches. Empty unless the further round repeats the
    previous one in every choice's order of events: only then all further rounds do, too, and take equally long."""
    settled = _Settled()
    try:
        choices = zip(_tried(few), _tried(stretched(few, size, 1)), strict=True)
    except ScheduleError:
        return []
    for (before, one), (after, other) in choices:
        if rounds(found := repetition(one, size)) < 2 or stretched(one, size, 1, found).actions != other.actions:
            return []
        order = place_gradient_sync(other)
        settled.append((after, after - before, order, repetition(order, size)))
    return settled


def forget() -> None:
    """Clear the cache of batched schedules, so that the next ones take as long as in a new process."""
    _batched.cache_clear()
    _settled.cache_clear()


def _tried(schedule: Schedule) -> list[tuple[float, Schedule]]:
    """For each choice: (seconds, the schedule with the order of events as its only list)."""
    stages = schedule.placement.num_stages
    runs = {
        priced: run_of(schedule, Costs.uniform(stages, FORWARD_SECONDS, backward, MESSAGE_SECONDS))
        for priced, backward in ((True, BACKWARD_SECONDS), (False, FORWARD_SECONDS))
    }
    goes = {priced: _goes(schedule, run) for priced, run in runs.items()}
    orders = [_ordered(schedule, runs[priced], goes[priced], made, but) for priced, made, but in _RULES]
    seconds = Costs.uniform(stages, FORWARD_SECONDS, BACKWARD_SECONDS).seconds()
    run = [in_order(schedule, order, seconds, lambda channel: MESSAGE_SECONDS) for order in orders]
    return [(each.seconds, replace(schedule, actions=(order,))) for each, order in zip(run, orders, strict=True)]


def place_gradient_sync(schedule: Schedule) -> Schedule:
    """Add every stage's REDUCE_GRAD after its last backward and the messages that come right after this backward. A
    list may be one rank's, or an order of all ranks' events."""
    rank_of = schedule.placement.rank_of
    rows: list[tuple[Action, ...]] = []
    for row in schedule.actions:
        places: list[tuple[int, int]] = []
        for stage, index in {stage: index for index, (op, stage, _) in enumerate(row, 1) if op in BACKWARDS}.items():
            own = rank_of(stage)
            while index < len(row) and (row[index].op in MESSAGES or rank_of(row[index].stage) != own):
                index += 1  # messages go first, since a neighbour waits for them
            places.append((index, stage))
        synced = list(row)
        for index, stage in sorted(places, reverse=True):
            synced.insert(index, Action(Op.REDUCE_GRAD, stage))
        rows.append(tuple(synced))
    return replace(schedule, actions=tuple(rows))


def _ordered(schedule: Schedule, run: Execution, goes: _Goes, made: Set[Op], but: Set[Op]) -> tuple[Action, ...]:
    """The events of one choice in order: computations, and each message as its SEND. A message is sent once it is made;
    if an operation in `made` makes it, only after its rank's next operation, unless that is in `but` or comes after
    idle time. No message is sent later than it is needed."""
    times: list[float] = []
    events: list[Action] = []
    for row, starts, ends in zip(schedule.actions, run.starts, run.ends, strict=True):
        last = len(row) - 1
        for index, (op, stage, mb) in enumerate(row):
            if (route := goes[op][stage]) is not None:
                sends, needed = route
                at = ends[index]
                if op in made and index < last and starts[index + 1] <= at and row[index + 1][0] not in but:
                    at, until = ends[index + 1], needed[mb]
                    at = until if until < at else at
                times.append(at)
                events.append(sends[mb])
    times += chain.from_iterable(run.starts)
    events += chain.from_iterable(schedule.actions)
    # A message comes before computations that start at the same time: sorting is stable.
    return tuple(map(events.__getitem__, sorted(range(len(times)), key=times.__getitem__)))


def _goes(schedule: Schedule, run: Execution) -> _Goes:
    count, stages = schedule.num_microbatches, schedule.placement.num_stages
    begun = [[[0.0] * count for _ in range(stages)] for _ in range(2)]
    for row, starts in zip(schedule.actions, run.starts, strict=True):
        for (op, stage, mb), start in zip(row, starts, strict=True):
            if op in PASSED_ON:
                begun[op is F][stage][mb] = start
    goes: _Goes = {op: [None] * stages for op in COMPUTE}
    for edge in schedule.edges:
        for op in edge.ops:
            goes[op][edge.sender] = lane(edge.send, edge.sender, count), begun[op is F][edge.receiver]
    return goes


def _lists(ordered: Schedule, capacities: Mapping[Channel, int] | None = None) -> Schedule:
    """The batched schedule whose lists follow one order of events. Unless capacities are given, a channel's is 2 n - 1,
    where n is the most receives that are posted and not yet used."""
    (order,), count, place = ordered.actions, ordered.num_microbatches, ordered.placement
    rows: list[list[Action]] = [[] for _ in range(place.pp)]
    own = [rows[place.rank_of(stage)] for stage in range(place.num_stages)]
    ends: dict[Op, list[_End]] = {op: [(row, None, (), None) for row in own] for op in Op}
    lines: dict[Channel, list[int]] = {}
    for edge in ordered.edges:
        line, receives = lines.setdefault(edge.channel, [0, 0, 0]), lane(edge.receive, edge.receiver, count)
        ends[edge.send][edge.sender] = own[edge.sender], own[edge.receiver], receives, line
        for op in edge.ops:
            ends[op][edge.receiver] = own[edge.receiver], None, (), line
    for action in order:
        op, stage, mb = action
        row, target, arrives, posted = ends[op][stage]
        row.append(action)
        if posted is None:
            continue
        if target is None:
            posted[0] -= 1
            continue
        target.append(arrives[mb])
        posted[0] += 1
        if posted[0] > posted[1]:
            posted[1], posted[2] = posted[0], posted[2] or len(target)
    if capacities is None:
        used = sorted((channel.target, first, channel, most) for channel, (_, most, first) in lines.items() if most)
        capacities = {channel: 2 * most - 1 for _, _, channel, most in used}
    lists = replace(ordered, actions=tuple(map(tuple, rows)), batched=True, capacities=capacities)
    remember_order(lists, order)
    return lists


_End = tuple[list[Action], list[Action] | None, Sequence[Action], list[int] | None]
"""Where an event goes: its rank's list; for a message also the receiver's list, the receives by microbatch, and of its
line (the posted and unused receives, the most of these so far, the index after the first receive)."""
