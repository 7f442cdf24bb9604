"""The pass behind batched messages: neighbouring messages of a rank start together and are waited for together.

Schedules of regular policies repeat a round of microbatches in the middle, again and again: batched is a short one.
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


_LEFT = 4
"""Rounds of one microbatch that a shortened schedule keeps: enough for what is repeated to have settled."""

_RULES: tuple[tuple[bool, Set[Op], Set[Op]], ...] = ((True, set(), set()), (False, {F}, {F}), (False, COMPUTE, set()))
"""The choices that are tried: whether a backward has its price or a forward's in the order of events; and the messages
of which operations move after the one that comes next on their rank, but for which of those."""

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
"""All choices with a round more: the seconds, those of the round, the order of events, and how it repeats itself."""
_Goes = dict[Op, list[tuple[Sequence[Action], list[float]] | None]]
"""By operation and stage, the SENDs of its results by microbatch and when each is used; None stands for no edge."""


@lru_cache(64)
def _settled(few: Schedule, size: int) -> _Settled:
    """Results of the choices with a round of `size` microbatches more. Empty unless the round makes every choice's
    order of events longer by the round before it: only then each further round does, too, and takes as many seconds."""
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
    """Forget the schedules that were batched before, so that the next ones take as long as in a new process."""
    _batched.cache_clear()
    _settled.cache_clear()


def _tried(schedule: Schedule) -> list[tuple[float, Schedule]]:
    """The seconds that each of the choices takes, and the schedule with its order of events as the one list."""
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
    """REDUCE_GRAD of every stage right after its last backward, and after the messages that follow it. A list may be
    one rank's, or an order of all ranks' events."""
    rank_of = schedule.placement.rank_of
    rows: list[tuple[Action, ...]] = []
    for row in schedule.actions:
        places: list[tuple[int, int]] = []
        for stage, index in {stage: index for index, (op, stage, _) in enumerate(row, 1) if op in BACKWARDS}.items():
            own = rank_of(stage)
            while index < len(row) and (row[index].op in MESSAGES or rank_of(row[index].stage) != own):
                index += 1  # what a neighbour waits for goes first
            places.append((index, stage))
        synced = list(row)
        for index, stage in sorted(places, reverse=True):
            synced.insert(index, Action(Op.REDUCE_GRAD, stage))
        rows.append(tuple(synced))
    return replace(schedule, actions=tuple(rows))


def _ordered(schedule: Schedule, run: Execution, goes: _Goes, made: Set[Op], but: Set[Op]) -> tuple[Action, ...]:
    """The events of one choice in their order: what is computed, and of each message its SEND. A message moves at once,
    or if one of `made` makes it, none of `but` comes then, and nothing stands idle between the two, after what comes
    then, if it is not needed before."""
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
    # A message stands before what starts at the same time: sorting leaves what is equal in its order.
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
    """The batched schedule whose lists follow one order of events. Of a channel's capacity, which is known or not, half
    are the receives that are posted and not yet used."""
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
"""Where an event goes: its rank's list; of a message also the receiver's, and the receives by microbatch. And how many
receives of that line are posted and not yet used, the most so far, and the place of the first."""
