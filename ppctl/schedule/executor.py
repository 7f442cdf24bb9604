"""How action lists run: every rank in its own order, messages in order per channel, sends that meet their receives.

The one execution rule: `simulate` reads its clocks, `verify` its stuck ranks, the capacity pass the slack of its
messages. The outcome does not depend on which rank is advanced first (a rank waits for one thing at a time and nothing
is shared), so each runs as far as it can and is woken by what it waits for: linear in the number of actions.

Must not know where a schedule or its costs come from. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from sys import maxsize
from typing import NamedTuple

from ppctl.schedule.action import INPUT_GRADIENTS, PASSED_ON, TIMED, Action, Channel, Op, Schedule, send_slots

_Ready = list[float | None]
"""Per microbatch: when a stage's input, or the gradient of its output, is there; None until that is known."""


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of running the lists. `starts` and `ends` (seconds) hold one entry per action that is no message, per
    rank in list order; `stuck` maps every rank that did not finish to the index of the action it waits at."""

    starts: list[list[float]]
    ends: list[list[float]]
    stuck: dict[int, int]


class _ChannelState:
    """The running state of one channel.

    A message starts when it is sent, its receive is posted and the message before it is through; then it takes
    `seconds`.
    """

    __slots__ = ("awake", "delivered", "free_at", "free_sends", "posted", "seconds", "sent", "waiters")

    def __init__(self, seconds: float, free_sends: int, awake: list[int]) -> None:
        self.seconds = seconds
        self.free_at = 0.0
        self.free_sends = free_sends
        self.sent: list[float] = []
        self.posted: list[tuple[float, _Ready, int]] = []
        self.delivered: list[float] = []
        self.waiters: list[int] = []
        self.awake = awake

    def send(self, clock: float) -> int:
        """Start a send. Returns how many of the line's messages must be through before the sender goes on."""
        self.sent.append(clock)
        if len(self.posted) >= len(self.sent):
            self._deliver()
        return len(self.sent) - self.free_sends

    def post(self, clock: float, ready: _Ready, mb: int) -> None:
        """Post a receive whose message is for `ready[mb]`."""
        self.posted.append((clock, ready, mb))
        if len(self.sent) >= len(self.posted):
            self._deliver()

    def carry(self, clock: float, ready: _Ready, mb: int) -> None:
        """Send a message whose receive is always posted: how the edges of a schedule without messages behave.

        A line carries all of its messages or none, and only what reads `ready[mb]` waits for a carried message.
        """
        start = clock if clock > self.free_at else self.free_at
        ready[mb] = self.free_at = start + self.seconds
        if self.waiters:
            self._wake()

    def _deliver(self) -> None:
        number = len(self.delivered)
        start, ready, mb = self.posted[number]
        ready[mb] = self.free_at = max(start, self.sent[number], self.free_at) + self.seconds
        self.delivered.append(self.free_at)
        if self.waiters:
            self._wake()

    def _wake(self) -> None:
        self.awake += self.waiters
        self.waiters.clear()


class _Work(NamedTuple):
    """One operation of one stage: its input, the line that brings the input, its cost and its result."""

    needs: _Ready
    comes_by: _ChannelState
    seconds: float
    gives: _Ready
    goes_by: _ChannelState | None
    """The channel of the result; None if the lists hold its SEND as an action, or no stage takes it."""


class _Lookup(NamedTuple):
    """Everything that a list can refer to, by operation and stage."""

    work: dict[Op, list[_Work]]
    sends: dict[Op, list[_ChannelState]]
    receives: dict[Op, list[tuple[_ChannelState, _Ready]]]


def execute(
    schedule: Schedule,
    seconds: Mapping[Op, Sequence[float]],
    message_seconds: Callable[[Channel], float],
    saved: Mapping[Action, float] | None = None,
) -> Execution:
    """Run every rank's list. `seconds[op][stage]` is what an operation takes, `saved` how much less some actions do;
    channels without capacity have no limit.

    The actions must belong to the schedule (stages, microbatches and messages that exist, on their own ranks). Order
    and completeness are free: a rank that waits for ever is reported in `stuck`.
    """
    awake = list(range(len(schedule.actions)))
    tables = _tables(schedule, seconds, message_seconds, awake)
    stuck = dict.fromkeys(awake, 0)
    starts: list[list[float]] = [[] for _ in awake]
    ends: list[list[float]] = [[] for _ in awake]
    ranks = [_run(schedule, r, tables, starts[r], ends[r], stuck, saved or {}) for r in awake]
    while awake:
        pp_rank = awake.pop()
        waits_for = next(ranks[pp_rank], None)
        if waits_for is not None:
            waits_for.waiters.append(pp_rank)
    return Execution(starts, ends, stuck)


def _run(
    schedule: Schedule,
    pp_rank: int,
    tables: _Lookup,
    starts: list[float],
    ends: list[float],
    stuck: dict[int, int],
    saved: Mapping[Action, float],
) -> Iterator[_ChannelState]:
    """One rank, from its first action to its last; yields the line whose next message it waits for.

    The neighbouring messages of a batched schedule are started together and waited for together, sends and receives
    alike.
    """
    work, sends, receives = tables
    clock = 0.0
    batch: list[_Open] = []
    for index, action in enumerate(schedule.actions[pp_rank]):
        op, stage, mb = action
        if op in work:
            if batch:
                clock = yield from _through(batch, pp_rank, clock, stuck)
            needs, line, seconds, gives, goes_by = work[op][stage]
            while (ready := needs[mb]) is None:
                stuck[pp_rank] = index
                yield line
            clock = ready if ready > clock else clock
            starts.append(clock)
            clock += seconds - saved[action] if action in saved else seconds
            ends.append(clock)
            if goes_by is not None:
                goes_by.carry(clock, gives, mb)
        elif op in sends:
            line = sends[op][stage]
            through = line.send(clock)
            if schedule.batched:
                batch.append((index, line, len(line.sent)))
            elif through > 0 and (len(line.delivered) < through or line.delivered[through - 1] > clock):
                clock = yield from _through([(index, line, through)], pp_rank, clock, stuck)
        else:
            line, wanted = receives[op][stage]
            line.post(clock, wanted, mb)
            if schedule.batched:
                batch.append((index, line, len(line.posted)))
    clock = yield from _through(batch, pp_rank, clock, stuck)
    del stuck[pp_rank]


_Open = tuple[int, _ChannelState, int]
"""A message that its rank waits for: its index in the list, its line, and how many of the line's must be through."""


def _through(
    batch: list[_Open], pp_rank: int, clock: float, stuck: dict[int, int]
) -> Generator[_ChannelState, None, float]:
    """Wait until these messages are through, and forget them; returns when that is."""
    for stuck[pp_rank], line, through in batch:
        while len(line.delivered) < through:
            yield line
        clock = max(clock, line.delivered[through - 1])
    batch.clear()
    return clock


def _tables(
    schedule: Schedule,
    seconds: Mapping[Op, Sequence[float]],
    message_seconds: Callable[[Channel], float],
    awake: list[int],
) -> _Lookup:
    """The work of every operation by stage. A list of ready times is one object for the action that fills it and the
    action that waits for it."""
    stages = range(schedule.placement.num_stages)
    ahead, back, silent = _lines(schedule, message_seconds, awake)
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
        {Op.SEND_F: ahead[1:], Op.SEND_B: back[:-1]},
        {
            Op.RECV_F: list(zip(ahead, inputs, strict=True)),
            Op.RECV_B: list(zip(back[1:], gradients[1:], strict=True)),
        },
    )


def _lines(
    schedule: Schedule, message_seconds: Callable[[Channel], float], awake: list[int]
) -> tuple[list[_ChannelState], list[_ChannelState], list[bool]]:
    """The line of every edge, forwards and backwards, and whether the edge carries its messages without actions.

    Edge s leads into stage s; the first and the last lead nowhere. Edges between the same two ranks share a line; in a
    batched schedule both directions share it.
    """
    place = schedule.placement
    ranks = [place.rank_of(stage) for stage in range(place.num_stages)]
    lines: dict[Channel, _ChannelState] = {}

    def line(channel: Channel) -> _ChannelState:
        queue = schedule.queue(channel)
        if queue not in lines:
            local = channel.source == channel.target
            capacity = schedule.capacities.get(channel)
            free_sends = maxsize if capacity is None else send_slots(capacity)
            lines[queue] = _ChannelState(0.0 if local else message_seconds(channel), free_sends, awake)
        return lines[queue]

    nowhere = _ChannelState(0.0, 0, awake)
    ahead = [line(Channel(before, after, "F")) for before, after in pairwise(ranks)]
    back = [line(Channel(after, before, "B")) for before, after in pairwise(ranks)]
    silent = [not in_lists for in_lists in schedule.messages_into[1:]]
    return [nowhere, *ahead, nowhere], [nowhere, *back, nowhere], [False, *silent, False]
