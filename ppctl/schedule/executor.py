"""How action lists run: every rank in its own order, messages in order per channel, sends that meet their receives.

The only execution rule: `simulate` reads its clocks, `verify` its stuck ranks, the capacity pass the slack of its
messages. The outcome does not depend on which rank is advanced first (a rank waits for one thing at a time, and nothing
is shared), so each rank runs as far as it can, and the event that it waits for wakes it: linear in the number of
actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from sys import maxsize
from typing import NamedTuple

from ppctl.schedule.action import INPUT_GRADIENTS, PASSED_ON, TIMED, Action, Channel, Op, Schedule, send_slots

_Ready = list[float | None]
"""Per microbatch: when a stage's input, or the gradient of its output, is there; None while unknown."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of running the lists. `starts` and `ends` have, per rank in list order, the seconds of every action
    that is no message; `stuck` maps every rank that did not finish to the index of the action at which it waits."""

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: dict[int, int]

    @property
    def seconds(self) -> float:
        """From the first start to the last end of all; 0 without actions."""
        last = max((ends[-1] for ends in self.ends if ends), default=0.0)
        return last - min((starts[0] for starts in self.starts if starts), default=0.0)


def order_of(schedule: Schedule) -> tuple[Action, ...] | None:
    """The order of events that all lists of a batched schedule follow (`in_order`); None if it is unknown here."""
    return vars(schedule).get("_order")


def remember_order(schedule: Schedule, order: tuple[Action, ...]) -> None:
    """Let `order_of` return `order` for a schedule. The order is not a field: `replace` drops it, as other lists may
    have none."""
    vars(schedule)["_order"] = order


class _ChannelState:
    """A channel. A message takes `seconds`; it starts once it is sent, its receive is posted and the previous message
    is delivered."""

    __slots__ = ("awake", "batches", "delivered", "free_at", "free_sends", "posted", "seconds", "sent", "waiters")

    def __init__(self, seconds: float, free_sends: int, awake: list[int], batches: Sequence[_OpenBatch]) -> None:
        self.seconds = seconds
        self.free_at = 0.0
        self.free_sends = free_sends
        self.sent: list[float] = []
        self.posted: list[tuple[float, _Ready, int]] = []
        self.delivered: list[float] = []
        self.waiters: list[int] = []
        self.awake = awake
        self.batches = batches

    def carried(self, number: int, pp_rank: int) -> Iterator[None]:
        """Yield while fewer than `number` messages are delivered; the last of them wakes this rank."""
        while len(self.delivered) < number:
            self.waiters.append(pp_rank)
            yield

    def deliver(self) -> None:
        """Deliver the next message, which is sent and whose receive is posted."""
        number = len(self.delivered)
        posted, ready, mb = self.posted[number]
        ready[mb] = self.free_at = at = max(posted, self.sent[number], self.free_at) + self.seconds
        self.delivered.append(at)
        for batch in self.batches:
            batch.open -= 1
            if at > batch.through:
                batch.through = at
            if batch.waits and not batch.open:
                batch.waits = False
                self.awake.append(batch.pp_rank)
        if self.waiters:
            self.wake()

    def wake(self) -> None:
        self.awake += self.waiters
        self.waiters.clear()


class _OpenBatch:
    """A batch of neighbouring messages of a rank's list: how many are undelivered, and when the last was delivered."""

    __slots__ = ("open", "pp_rank", "through", "waits")

    def __init__(self, pp_rank: int) -> None:
        self.pp_rank = pp_rank
        self.open = 0
        self.through = 0.0
        self.waits = False

    def over(self) -> Iterator[None]:
        """Yield while a message of the batch is undelivered; the last one wakes the rank."""
        if self.open:
            self.waits = True
            yield


class _Work(NamedTuple):
    """One operation of one stage: its input, the line that brings the input, its cost and its result."""

    needs: _Ready
    comes_by: _ChannelState
    seconds: float
    gives: _Ready
    goes_by: _ChannelState | None
    """The line of a result without a SEND, whose receive is always posted: it carries no other messages."""


class _Lookup(NamedTuple):
    """Tables for everything that a list can refer to, by operation and stage."""

    work: dict[Op, list[_Work]]
    messages: dict[Op, list[tuple[_ChannelState, _Ready | None]]]
    """The line of a message, and the times of the inputs that it brings; None for a send."""
    saved: Mapping[Action, float]


def in_order(
    schedule: Schedule,
    order: Iterable[Action],
    seconds: Mapping[Op, Sequence[float]],
    message_seconds: Callable[[Channel], float],
) -> Execution:
    """Run a batched schedule whose lists follow one `order` of computations and SENDs. Like `execute`, but without
    waiting ranks, since the first of the remaining events can always go on."""
    place, pp = schedule.placement, schedule.placement.pp
    starts: list[list[float]] = [[] for _ in range(pp)]
    ends: list[list[float]] = [[] for _ in range(pp)]
    clocks, through = [0.0] * pp, [0.0] * pp
    """By rank, when its last operation ended, and when its last message was delivered."""
    ranks = [place.rank_of(stage) for stage in range(place.num_stages)]
    table = {op: [(r, -1, lasts, [0.0]) for r, lasts in zip(ranks, own, strict=True)] for op, own in seconds.items()}
    free_at = {edge.channel[:2]: [0.0] for edge in schedule.edges}
    lasting = {edge.channel[:2]: message_seconds(edge.channel) for edge in reversed(schedule.edges)}
    for edge in schedule.edges:
        pair = edge.channel[:2]
        table.setdefault(edge.send, [(0, 0, 0.0, [])] * len(ranks))[edge.sender] = (*pair, lasting[pair], free_at[pair])
    for op, stage, _ in order:
        rank, other, lasts, free = table[op][stage]
        if other < 0:
            at = clocks[rank]
            if through[rank] > at:
                at = through[rank]
            starts[rank].append(at)
            clocks[rank] = at = at + lasts
            ends[rank].append(at)
            continue
        at = free[0]
        if clocks[rank] > at:
            at = clocks[rank]
        if clocks[other] > at:
            at = clocks[other]
        free[0] = at = at + lasts
        if at > through[rank]:
            through[rank] = at
        if at > through[other]:
            through[other] = at
    return Execution(starts, ends, {})


def execute(
    schedule: Schedule,
    seconds: Mapping[Op, Sequence[float]],
    message_seconds: Callable[[Channel], float],
    saved: Mapping[Action, float] | None = None,
) -> Execution:
    """Run every rank's list; returns the Execution. `seconds[op][stage]` is an operation's time; `saved` has the
    seconds that some actions take less. Channels without a capacity have no limit.

    The actions must belong to the schedule (stages, microbatches and messages that exist, on their own ranks). They may
    be in any order and incomplete: a rank that waits for ever is reported in `stuck`.
    """
    order = order_of(schedule)
    if order is not None and not saved:
        return in_order(schedule, order, seconds, message_seconds)
    awake = list(range(len(schedule.actions)))
    batches = list(map(_OpenBatch, awake))
    tables = _tables(schedule, seconds, message_seconds, awake, batches)._replace(saved=saved or {})
    stuck = dict.fromkeys(awake, 0)
    starts: list[list[float]] = [[] for _ in awake]
    ends: list[list[float]] = [[] for _ in awake]
    ranks = [_run(schedule, batches[r], tables, starts[r], ends[r], stuck) for r in awake]
    while awake:
        next(ranks[awake.pop()], None)
    for batch in batches:
        if batch.waits:
            stuck[batch.pp_rank] = _first_open(schedule.actions[batch.pp_rank], tables)
    return Execution(starts, ends, stuck)


def _run(
    schedule: Schedule,
    batch: _OpenBatch,
    tables: _Lookup,
    starts: list[float],
    ends: list[float],
    stuck: dict[int, int],
) -> Iterator[None]:
    """Run one rank from its first action to its last; yields while it waits for a message, which wakes it. Neighbouring
    messages of a batched schedule are started together and waited for together, sends and receives alike. One loop
    without calls, because it runs once for every action."""
    work, messages, saved = tables
    batched, pp_rank, clock = schedule.batched, batch.pp_rank, 0.0
    for index, (op, stage, mb) in enumerate(schedule.actions[pp_rank]):
        if op in work:
            if batch.open:
                yield from batch.over()
            clock = batch.through if batch.through > clock else clock
            needs, line, seconds, gives, goes_by = work[op][stage]
            while (ready := needs[mb]) is None:
                stuck[pp_rank] = index
                line.waiters.append(pp_rank)
                yield
            clock = ready if ready > clock else clock
            starts.append(clock)
            clock += seconds - saved.get(Action(op, stage, mb), 0.0) if saved else seconds
            ends.append(clock)
            if goes_by is not None:  # only readers of `gives` wait for the result
                gives[mb] = goes_by.free_at = goes_by.seconds + (clock if clock > goes_by.free_at else goes_by.free_at)
                if goes_by.waiters:
                    goes_by.wake()
            continue
        batch.open += batched
        line, wanted = messages[op][stage]
        if wanted is None:
            line.sent.append(clock)
        else:
            line.posted.append((clock, wanted, mb))
        if len(line.sent) > len(line.delivered) < len(line.posted):
            line.deliver()
        if wanted is None and (through := len(line.sent) - line.free_sends) > 0:
            stuck[pp_rank] = index
            yield from line.carried(through, pp_rank)
            clock = max(clock, line.delivered[through - 1])
    yield from batch.over()
    del stuck[pp_rank]


def _first_open(row: Sequence[Action], tables: _Lookup) -> int:
    """The index of the first undelivered message of a rank's list."""
    started = Counter[int]()
    for index, (op, stage, _) in enumerate(row):
        if op in tables.messages:
            line, _ = tables.messages[op][stage]
            started[id(line)] += 1
            if started[id(line)] > len(line.delivered):
                return index
    raise AssertionError("a rank waits for messages that are all delivered")


def _tables(
    schedule: Schedule,
    seconds: Mapping[Op, Sequence[float]],
    message_seconds: Callable[[Channel], float],
    awake: list[int],
    batches: Sequence[_OpenBatch],
) -> _Lookup:
    """The work of every operation by stage. The action that fills a list of ready times and the action that waits for
    it share one list object."""
    stages = range(schedule.placement.num_stages)
    ahead, back, silent = _lines(schedule, message_seconds, awake, batches)
    at_once: _Ready = [0.0] * schedule.num_microbatches
    unknown: list[_Ready] = [[None] * len(at_once) for _ in range(2 * len(stages))]
    inputs = [at_once, *unknown[: len(stages)]]
    gradients = [*unknown[len(stages) :], at_once]

    def forward(s: int) -> _Work:
        goes_by = ahead[s + 1] if silent[s + 1] else None
        return _Work(inputs[s], ahead[s], seconds[Op.F][s], inputs[s + 1], goes_by)

    def backward(op: Op, s: int) -> _Work:
        goes_by = back[s] if silent[s] and schedule.gradient_leaves(s) else None
        return _Work(gradients[s + 1], back[s + 1], seconds[op][s], gradients[s], goes_by)

    def alone(op: Op, s: int) -> _Work:
        return _Work(at_once, ahead[0], seconds[op][s], at_once, None)

    return _Lookup(
        {
            Op.F: [forward(s) for s in stages],
            **{op: [backward(op, s) for s in stages] for op in INPUT_GRADIENTS},
            **{op: [alone(op, s) for s in stages] for op in TIMED - PASSED_ON},
        },
        {
            Op.SEND_F: [(line, None) for line in ahead[1:]],
            Op.SEND_B: [(line, None) for line in back[:-1]],
            Op.RECV_F: list(zip(ahead, inputs, strict=True)),
            Op.RECV_B: list(zip(back[1:], gradients[1:], strict=True)),
        },
        {},
    )


def _lines(
    schedule: Schedule, message_seconds: Callable[[Channel], float], awake: list[int], batches: Sequence[_OpenBatch]
) -> tuple[list[_ChannelState], list[_ChannelState], list[bool]]:
    """For every edge (its line forwards, its line backwards, whether its messages have no actions). Edge s leads into
    stage s; the first and the last lead nowhere. Edges between the same two ranks share a line; in a batched schedule
    both directions share it."""
    place = schedule.placement
    ranks = [place.rank_of(stage) for stage in range(place.num_stages)]
    lines: dict[Channel, _ChannelState] = {}

    def line(channel: Channel) -> _ChannelState:
        queue = schedule.queue(channel)
        if queue not in lines:
            local = channel.source == channel.target
            capacity = None if schedule.batched else schedule.capacities.get(channel)
            free_sends = maxsize if capacity is None else send_slots(capacity)
            ends = [batches[channel.source], batches[channel.target]] if schedule.batched else []
            lines[queue] = _ChannelState(0.0 if local else message_seconds(channel), free_sends, awake, ends)
        return lines[queue]

    nowhere = _ChannelState(0.0, 0, awake, ())
    ahead = [line(Channel(before, after, "F")) for before, after in pairwise(ranks)]
    back = [line(Channel(after, before, "B")) for before, after in pairwise(ranks)]
    silent = [not in_lists for in_lists in schedule.messages_into[1:]]
    return [nowhere, *ahead, nowhere], [nowhere, *back, nowhere], [False, *silent, False]
