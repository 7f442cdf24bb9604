"""Orders made by simulating the step: whenever a rank is free, a rule picks its next action.

The rule is greedy and knows only messages sent so far; `search` tries many rules and altered costs to find a good
order. Memory comes first: a forward starts only if every later stage of its rank will still have room for one
microbatch, so that no rule ever hangs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from heapq import heappop, heappush

from ppctl.schedule.lane_orders import KINDS, Lanes, Rows

_NEVER = float("inf")
_F, _I, _W = range(KINDS)
"""The kind of a lane: lane 3s + kind is that operation of stage s."""


class First(StrEnum):
    """Which of several forwards, or of several backwards, goes first."""

    OLDEST = "oldest"
    """The action of the oldest microbatch."""
    DEEPEST = "deepest"
    """The action of the last stage: a microbatch is finished before another one starts."""
    FLOW = "flow"
    """The action that would be first if all stages took equally long and microbatches came one by one."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule for a free rank's next action: an I before an F, and both before a W, except as the fields say."""

    first: First = First.OLDEST
    alternate: bool = True
    """After an I, a forward goes before the next I."""
    make_room: bool = True
    """If memory delays a forward, weight gradients go before an I."""
    late_forward: float = 0.5
    """A forward starts although an I arrives before it ends, if the I waits for at most this share of the forward."""
    late_weights: float = 0.5
    """A W starts although an F or I arrives before it ends, if that one waits for at most this share of the W."""


class _StepInProgress:
    """A simulated step whose order `choose` makes, given up once it cannot end by `latest` seconds."""

    def __init__(self, lanes: Lanes, latest: float = _NEVER) -> None:
        self.lanes = lanes
        self.latest = [latest - sums - work for sums, work in zip(lanes.sums, lanes.work(), strict=True)]
        """Per pp_rank the latest start of its next entry: `latest` minus its remaining work."""
        size, pp = len(lanes.seconds), lanes.placement.pp
        self.ready: list[list[float]] = [[] for _ in range(size)]
        self.ready[0] = [0.0] * lanes.num_microbatches
        self.count = [0] * size
        self.held = [0.0] * pp
        self.rows: Rows = [[] for _ in range(pp)]
        self._free = [0.0] * len(lanes.line_seconds)
        self._busy_until = [0.0] * pp
        self._wakes = [0.0] * pp
        self._queue = [(0.0, pp_rank) for pp_rank in range(pp)]

    def choose(self, pp_rank: int, now: float) -> tuple[int, float]:
        """(the lane to work on, the time); or (-1, when to ask again unless something arrives before)."""
        raise NotImplementedError

    def made(self) -> Rows | None:
        """The rows; None if the step hangs or was given up."""
        queue, wakes, latest = self._queue, self._wakes, self.latest
        while queue:
            now, pp_rank = heappop(queue)
            if wakes[pp_rank] != now:
                continue  # the rank was woken earlier
            if now > latest[pp_rank]:
                return None
            wakes[pp_rank] = _NEVER
            lane, again = self.choose(pp_rank, now)
            if lane >= 0:
                self._start(pp_rank, lane, now)
            elif again < _NEVER:
                self._wake(pp_rank, again)
        complete = sum(map(len, self.rows)) == len(self.lanes.seconds) * self.lanes.num_microbatches
        return self.rows if complete else None

    def _wake(self, pp_rank: int, at: float) -> None:
        self._wakes[pp_rank] = at
        heappush(self._queue, (at, pp_rank))

    def _start(self, pp_rank: int, lane: int, now: float) -> None:
        """Let a rank work on the next entry of a lane from now on, and choose again when it ends."""
        lanes = self.lanes
        self.rows[pp_rank].append(lane)
        self.count[lane] += 1
        self.held[pp_rank] += lanes.grows[lane]
        end = now + lanes.seconds[lane]
        self.latest[pp_rank] += lanes.seconds[lane]
        self._busy_until[pp_rank] = end
        self._wake(pp_rank, end)
        if lane % KINDS == _I:
            self.ready[lane + 1].append(end)
        if (target := lanes.goes_to[lane]) >= 0:
            self._hand_on(lane, target, end)

    def _hand_on(self, lane: int, target: int, end: float) -> None:
        """Send a result that is made at `end` to the lane that uses it, and wake the rank of that lane."""
        channel = self.lanes.line[lane]
        if channel < 0:
            self.ready[target].append(end)
            return
        arrival = max(end, self._free[channel]) + self.lanes.line_seconds[channel]
        self._free[channel] = arrival
        self.ready[target].append(arrival)
        receiver = self.lanes.rank_of[target // KINDS]
        at = max(arrival, self._busy_until[receiver])
        if at < self._wakes[receiver]:
            self._wake(receiver, at)


class OrderByRule(_StepInProgress):
    """The rows that `rule` makes if pp_rank r holds at most `limits[r]`, which must not exceed the lanes' limit. `made`
    returns None if a limit has no room for one microbatch on all stages of its rank."""

    def __init__(self, lanes: Lanes, rule: Rule, limits: Sequence[float]) -> None:
        super().__init__(lanes)
        self.rule = rule
        self.stride, self.offset = _ranking(lanes, rule.first)
        self.room = _rooms(lanes, limits)
        """Stage -> the memory that the stage's rank may hold before a forward of the stage starts."""
        self.limits = limits
        self.after_gradient = [False] * lanes.placement.pp

    def choose(self, pp_rank: int, now: float) -> tuple[int, float]:
        """Return (the lane that the rule picks, `now`), or (-1, the time at which to call again). The choice counts as
        made: the next one alternates with it."""
        forward, next_forward, held_up = self._first(_F, pp_rank, now)
        gradient, next_gradient, _ = self._first(_I, pp_rank, now)
        weights, _, _ = self._first(_W, pp_rank, now)
        rule, seconds = self.rule, self.lanes.seconds
        lane = -1
        full = gradient >= 0 and self.held[pp_rank] + self.lanes.grows[gradient] > self.limits[pp_rank]
        if weights >= 0 and (full or (held_up and rule.make_room and forward < 0)):
            lane = weights
        elif gradient >= 0:
            turn = forward >= 0 and rule.alternate and self.after_gradient[pp_rank]
            lane = forward if turn else gradient
        elif forward >= 0 and now + (1.0 - rule.late_forward) * seconds[forward] <= next_gradient:
            lane = forward
        elif weights >= 0:
            due = next_gradient if forward >= 0 else min(next_forward, next_gradient)
            if now + (1.0 - rule.late_weights) * seconds[weights] <= due:
                lane = weights
        if lane < 0:
            return -1, min(next_forward, next_gradient)
        if lane % KINDS != _W:
            self.after_gradient[pp_rank] = lane == gradient
        return lane, now

    def _first(self, kind: int, pp_rank: int, now: float) -> tuple[int, float, bool]:
        """Choose among a rank's lanes of one kind (`_F`, `_I` or `_W`). Returns the lane that goes first, or -1; when
        the next one can start; and whether a forward could start but for memory."""
        count, ready, held = self.count, self.ready, self.held[pp_rank]
        best, best_key, later, held_up = -1, 0.0, _NEVER, False
        for stage in self.lanes.stages_of[pp_rank]:
            lane = KINDS * stage + kind
            mb = count[lane]
            if mb >= len(ready[lane]):
                continue
            at = ready[lane][mb]
            if kind == _F and held > self.room[stage]:
                held_up = held_up or at <= now
            elif at > now:
                later = min(later, at)
            elif best < 0 or mb * self.stride + self.offset[lane] < best_key:
                best, best_key = lane, mb * self.stride + self.offset[lane]
        return best, later, held_up


def _ranking(lanes: Lanes, first: First) -> tuple[float, list[float]]:
    """(a stride, an offset by lane): the entry with the smallest microbatch x stride + offset goes first."""
    stages = lanes.placement.num_stages
    forward = [float(stage) for stage in range(stages)]
    stride = 1.0
    if first is First.OLDEST:
        stride = 2.0 * stages
    elif first is First.DEEPEST:
        forward = [-float(stage * lanes.num_microbatches) for stage in range(stages)]
    backward = forward if first is First.DEEPEST else forward[::-1]
    return stride, [offset for pair in zip(forward, backward, backward, strict=True) for offset in pair]


def _rooms(lanes: Lanes, limits: Sequence[float]) -> list[float]:
    """For each stage its rank's limit, minus one microbatch on this and every later stage, minus what an I adds."""
    room = [0.0] * lanes.placement.num_stages
    for pp_rank, (stages, limit) in enumerate(zip(lanes.stages_of, limits, strict=True)):
        limit -= lanes.reserve(pp_rank)
        for stage in reversed(stages):
            limit -= lanes.sizes[stage]
            room[stage] = limit
    return room


class WeightsPlaced(_StepInProgress):
    """The given rows, with their order of F and I, but with every W where its rank would pause or needs the memory.
    `late_weights` is as in `Rule`. `made` returns None if memory would block an F for ever, or the step would end after
    `latest`."""

    def __init__(self, lanes: Lanes, rows: Rows, late_weights: float, latest: float = _NEVER) -> None:
        super().__init__(lanes, latest)
        self.order = [[lane for lane in row if lane % KINDS != _W] for row in rows]
        self.at = [0] * len(rows)
        self.owed: list[deque[int]] = [deque() for _ in rows]
        self.late_weights = late_weights
        self.reserve = [lanes.reserve(pp_rank) for pp_rank in range(len(rows))]

    def choose(self, pp_rank: int, now: float) -> tuple[int, float]:
        """The next lane of the order if it can start; else a W, if memory needs one or the W fits a pause. A forward
        leaves room for the memory that an I adds."""
        order, at, owed, lanes = self.order[pp_rank], self.at[pp_rank], self.owed[pp_rank], self.lanes
        arrival = _NEVER
        full = False
        if at < len(order):
            lane = order[at]
            if (mb := self.count[lane]) < len(self.ready[lane]):
                arrival = self.ready[lane][mb]
            needed = lanes.grows[lane] + (self.reserve[pp_rank] if lane % KINDS == _F else 0.0)
            full = needed > 0 and self.held[pp_rank] + needed > lanes.limits[pp_rank]
            if arrival <= now and not full:
                self.at[pp_rank] = at + 1
                if lane % KINDS == _I:
                    owed.append(lane + 1)
                return lane, now
        if owed and (full or now + (1.0 - self.late_weights) * lanes.seconds[owed[0]] <= arrival):
            return owed.popleft(), now
        return -1, _NEVER if full else arrival
