"""A schedule search's task, and the orders that it tries: rows of lane numbers, and when each rank ends.

A lane is one operation of one stage for all microbatches, which run in order: only the order in which a rank's lanes
take turns is searched. `Clock` gives the executor's times for schedules without messages (a test compares them). It is
separate code because it runs thousands of times per search, without unsplit backwards, capacities or batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from ppctl.errors import Problem, ScheduleError
from ppctl.schedule.action import Action, B, Channel, F, I, Op, Placement, Schedule, W
from ppctl.schedule.policies import AUTO, POLICIES, make_schedule
from ppctl.schedule.simulate import Costs

KINDS = 3
"""Lanes of a stage: lane 3s is F of stage s, 3s + 1 its I, 3s + 2 its W."""

ROUNDING = 1e-9
"""Relative difference up to which two sums count as equal."""

_OPS: tuple[Op, ...] = (F, I, W)

Rows = list[list[int]]
"""For every pp_rank the lanes in the order of work; a lane's n-th entry is microbatch n."""

Block = tuple[int, int, int]
"""A pp_rank, and the first and last index of consecutive entries of its row."""


@dataclass(frozen=True, slots=True)
class Task:
    """The stages, costs and limits for which a schedule is searched."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    sizes: Sequence[float]
    """The memory of one microbatch on each stage from its F to its I, in any unit."""
    limits: Sequence[float]
    """The memory that each pp_rank may hold at once, in that unit."""
    group: int | None = None
    """`microbatch_group_size` of the named schedules."""
    deferred: Sequence[float] | None = None
    """Memory that one microbatch holds on each stage from its I to its W. None: as much as before its I, since all
    activations stay until W."""


def placements(pp: int, vpp: int) -> list[Placement]:
    """The possible placements: a loop, and a V for two chunks per rank."""
    return [Placement(kind, pp, pp * vpp) for kind in ("loop", "v") if kind == "loop" or vpp == 2]


def unit_of_memory(sizes: Sequence[float], pp: int, num_microbatches: int) -> float:
    """The memory of 1F1B's first rank: min(pp, num_microbatches) microbatches on the first pp-th of the stages."""
    return min(pp, num_microbatches) * sum(sizes[: len(sizes) // pp])


def least_limits(placement: Placement, sizes: Sequence[float], deferred: Sequence[float] | None = None) -> list[float]:
    """The least limit of every pp_rank: one microbatch on all of its stages, and the memory that an I adds for its W.
    If an I adds nothing, every schedule needs this much: while a rank's last stage computes, the microbatch is on all
    of the rank's stages."""
    later = sizes if deferred is None else deferred
    stages_of = [placement.stages_of(r) for r in range(placement.pp)]
    return [sum(sizes[s] for s in own) + max(0.0, *(later[s] - sizes[s] for s in own)) for own in stages_of]


def named_schedules(task: Task) -> Iterator[Schedule]:
    """Every schedule with a name that runs on this placement."""
    place = task.placement
    vpp = place.num_stages // place.pp
    for name, policy in POLICIES.items():
        if not policy.trains or policy.placement != place.kind or not policy.runs(vpp):
            continue
        try:
            yield make_schedule(
                name, pp=place.pp, vpp=vpp, num_microbatches=task.num_microbatches, microbatch_group_size=task.group
            )
        except ScheduleError:
            continue  # not made for this few microbatches or this size of groups


def one_by_one(placement: Placement, num_microbatches: int) -> Schedule:
    """One microbatch after another through all stages and back: no rank ever holds more than one."""
    rows = []
    for r in range(placement.pp):
        own = placement.stages_of(r)
        order = [*((F, stage) for stage in own), *((B, stage) for stage in reversed(own))]
        rows.append(tuple(Action(op, stage, mb) for mb in range(num_microbatches) for op, stage in order))
    return Schedule(AUTO, placement, num_microbatches, tuple(rows))


def check_limits(task: Task) -> None:
    """Raise ScheduleError (PP-E321) if a limit has no room for one microbatch on all stages of its rank."""
    least = least_limits(task.placement, task.sizes, task.deferred)
    short = [r for r, (need, limit) in enumerate(zip(least, task.limits, strict=True)) if need > limit * (1 + ROUNDING)]
    if short:
        rank = max(short, key=lambda r: least[r] / task.limits[r] if task.limits[r] > 0 else least[r] + 1e300)
        message = (
            f"pp_rank {rank} may hold {task.limits[rank]:.4g} of activations, but one microbatch on its stages "
            f"takes {least[rank]:.4g}, and no schedule needs less"
        )
        raise ScheduleError(Problem("PP-E321", message))


@dataclass(frozen=True, slots=True)
class Lanes:
    """The costs of all lanes, the lanes that use their results, and the memory that ranks may use."""

    placement: Placement
    num_microbatches: int
    seconds: list[float]
    goes_to: list[int]
    """For each lane, the lane that takes its result as input; -1 if no lane does."""
    line: list[int]
    """For each lane, the channel of its result, as an index of `line_seconds`; -1 if the result stays on the rank."""
    line_seconds: list[float]
    rank_of: list[int]
    """The pp_rank of every stage."""
    stages_of: list[tuple[int, ...]]
    """The stages of every pp_rank."""
    sizes: Sequence[float]
    """Memory, in any unit, that one microbatch holds on each stage from its F to its I."""
    grows: list[float]
    """For each lane, how much more its rank holds after an entry."""
    limits: Sequence[float]
    """Memory limit of each pp_rank in the unit of `sizes`, raised by 1e-9 because sums are rounded."""
    sums: list[float]
    """Seconds that every pp_rank takes to sum gradients, after its last entry."""

    @classmethod
    def of(cls, task: Task) -> Lanes:
        """The task as Lanes, in which orders are tried."""
        placement, costs = task.placement, task.costs
        stages = range(placement.num_stages)
        rank_of = [placement.rank_of(stage) for stage in stages]
        of_op = costs.seconds()
        seconds = [of_op[op][stage] for stage in stages for op in _OPS]
        goes_to, line, channels = [-1] * len(seconds), [-1] * len(seconds), dict[Channel, int]()
        for lane, target, direction in _edges(placement.num_stages):
            goes_to[lane] = target
            here, there = rank_of[lane // KINDS], rank_of[target // KINDS]
            if here != there:
                line[lane] = channels.setdefault(Channel(here, there, direction), len(channels))
        stages_of = [placement.stages_of(pp_rank) for pp_rank in range(placement.pp)]
        kept = zip(task.sizes, task.sizes if task.deferred is None else task.deferred, strict=True)
        return cls(
            placement,
            task.num_microbatches,
            seconds,
            goes_to,
            line,
            [costs.messages.get(channel, costs.message) for channel in channels],
            rank_of,
            stages_of,
            task.sizes,
            [more for size, deferred in kept for more in (size, deferred - size, -deferred)],
            [limit * (1 + ROUNDING) for limit in task.limits],
            [sum(of_op[Op.REDUCE_GRAD][stage] for stage in stages) for stages in stages_of],
        )

    def altered(self, message: float, even: float, stretch: Sequence[float] | None) -> Lanes:
        """The lanes with other costs: message times `message` times as long, stage times moved to their mean by the
        share `even`, and each lane's time multiplied by its factor in `stretch`."""
        seconds = list(self.seconds)
        for kind in range(KINDS):
            mean = sum(seconds[kind::KINDS]) / self.placement.num_stages
            seconds[kind::KINDS] = [(1.0 - even) * each + even * mean for each in seconds[kind::KINDS]]
        if stretch is not None:
            seconds = [each * factor for each, factor in zip(seconds, stretch, strict=True)]
        return replace(self, seconds=seconds, line_seconds=[message * each for each in self.line_seconds])

    def work(self) -> list[float]:
        """Seconds of computing per pp_rank and step."""
        count = self.num_microbatches
        return [count * sum(self.stage_seconds(stage) for stage in stages) for stages in self.stages_of]

    def stage_seconds(self, stage: int) -> float:
        """Seconds of F, I and W of one microbatch on a stage."""
        return sum(self.seconds[KINDS * stage : KINDS * (stage + 1)])

    def firsts(self) -> list[float]:
        """For each lane of F or I, the earliest start of its first microbatch, through all earlier stages."""
        first, clock, lane = [0.0] * len(self.seconds), 0.0, 0
        while lane >= 0:
            first[lane] = clock
            clock += self.seconds[lane] + (self.line_seconds[self.line[lane]] if self.line[lane] >= 0 else 0.0)
            lane = self.goes_to[lane]
        return first

    def bound(self) -> float:
        """A lower bound, in seconds, on the time of a step in any order of lanes: the largest of three bounds. These
        are one microbatch through all stages and back; for each rank, the earliest start of a forward and all its work;
        and the earliest start of a backward and all its backwards. Work includes the sums of gradients."""
        first, count, seconds = self.firsts(), self.num_microbatches, self.seconds
        bounds = [first[1] + seconds[1] + seconds[2]]
        for stages, work, sums in zip(self.stages_of, self.work(), self.sums, strict=True):
            backward = count * sum(seconds[KINDS * s + 1] + seconds[KINDS * s + 2] for s in stages)
            bounds.append(min(first[KINDS * s] for s in stages) + work + sums)
            bounds.append(min(first[KINDS * s + 1] for s in stages) + backward + sums)
        return max(bounds)

    def peaks(self, rows: Rows) -> list[float]:
        """The peak memory of every pp_rank."""
        return [max(accumulate(map(self.grows.__getitem__, row)), default=0.0) for row in rows]

    def held_by(self, schedule: Schedule) -> list[float]:
        """The peak memory of every pp_rank under a schedule whose microbatches run in order."""
        rows = rows_of(schedule)
        assert rows is not None
        return self.peaks(rows)

    def reserve(self, pp_rank: int) -> float:
        """The most memory that an I of a rank adds."""
        return max(0.0, *(self.grows[KINDS * stage + 1] for stage in self.stages_of[pp_rank]))

    def fit(self, rows: Rows) -> bool:
        """Whether every pp_rank holds at most its limit."""
        return all(peak <= limit for peak, limit in zip(self.peaks(rows), self.limits, strict=True))

    def sound(self, pp_rank: int, row: Sequence[int]) -> bool:
        """Whether a row's backwards come after their forwards and its Ws after their Is, within the memory limit."""
        count = [0] * len(self.seconds)
        held, limit, grows = 0.0, self.limits[pp_rank], self.grows
        for lane in row:
            held += grows[lane]
            if held > limit or (lane % KINDS and count[lane] >= count[lane - 1]):
                return False
            count[lane] += 1
        return True


def _edges(num_stages: int) -> Iterator[tuple[int, int, str]]:
    """Yield (lane, the lane that uses its result, direction); the last stage's F to its own I needs no message."""
    last = num_stages - 1
    for stage in range(num_stages):
        forward = KINDS * stage
        yield forward, forward + KINDS if stage < last else forward + 1, "F"
        if stage > 0:
            yield forward + 1, forward + 1 - KINDS, "B"


def rows_of(schedule: Schedule) -> Rows | None:
    """A compute-only schedule's rows, an unsplit backward as I and W; None if microbatches are out of order."""
    count = [0] * (KINDS * schedule.placement.num_stages)
    rows: Rows = []
    for actions in schedule.actions:
        row: list[int] = []
        for op, stage, mb in actions:
            kinds = (1, 2) if op is B else (_OPS.index(op),)
            for lane in (KINDS * stage + kind for kind in kinds):
                if count[lane] != mb:
                    return None
                count[lane] += 1
                row.append(lane)
        rows.append(row)
    return rows


def schedule_of(rows: Rows, lanes: Lanes, name: str) -> Schedule:
    """The compute-only schedule with these rows."""
    count = [0] * len(lanes.seconds)
    actions = []
    for row in rows:
        own = []
        for lane in row:
            own.append(Action(_OPS[lane % KINDS], lane // KINDS, count[lane]))
            count[lane] += 1
        actions.append(tuple(own))
    return Schedule(name, lanes.placement, lanes.num_microbatches, tuple(actions))


class Clock:
    """One simulated run of each rank's order: when each rank ends (`ends`, None if any hangs) and, if `traced`, which
    microbatch each entry waited for. A message waits only for earlier ones of its channel."""

    def __init__(self, lanes: Lanes, rows: Rows, *, traced: bool = False) -> None:
        self.lanes, self.rows = lanes, rows
        size = len(lanes.seconds)
        self.waits: list[list[int]] = [[] for _ in rows]
        """Per entry the microbatch whose arrival it waited for, -1 if the rank was not idle before it."""
        self.traced = traced
        self._ready: list[list[float]] = [[] for _ in range(size)]
        self._ready[0] = [0.0] * lanes.num_microbatches
        self._count, self._waiter = [0] * size, [-1] * size
        self._free = [0.0] * len(lanes.line_seconds)
        self._at, self._position = [0.0] * len(rows), [0] * len(rows)
        self._awake = list(range(len(rows)))
        while self._awake:
            self._advance(self._awake.pop())
        hangs = any(at < len(row) for at, row in zip(self._position, rows, strict=True))
        self.ends: list[float] | None = None if hangs else self._at

    def _advance(self, pp_rank: int) -> None:
        """Run a rank as far as it can; the event that it waits for wakes it."""
        lanes, count, ready, waiter, free = self.lanes, self._count, self._ready, self._waiter, self._free
        seconds, goes_to, line, line_seconds = lanes.seconds, lanes.goes_to, lanes.line, lanes.line_seconds
        row, clock, waits = self.rows[pp_rank], self._at[pp_rank], self.waits[pp_rank]
        for index in range(self._position[pp_rank], len(row)):
            lane = row[index]
            waited = -1
            if lane % KINDS != 2:
                mb, arrivals = count[lane], ready[lane]
                if mb >= len(arrivals):
                    waiter[lane] = pp_rank
                    self._at[pp_rank], self._position[pp_rank] = clock, index
                    return
                count[lane] = mb + 1
                if arrivals[mb] > clock:
                    clock, waited = arrivals[mb], mb
            clock += seconds[lane]
            if self.traced:
                waits.append(waited)
            if (target := goes_to[lane]) >= 0:
                arrival = clock
                if (channel := line[lane]) >= 0:
                    arrival = (free[channel] if free[channel] > clock else clock) + line_seconds[channel]
                    free[channel] = arrival
                ready[target].append(arrival)
                if waiter[target] >= 0:
                    self._awake.append(waiter[target])
                    waiter[target] = -1
        self._at[pp_rank], self._position[pp_rank] = clock, len(row)


def critical_blocks(lanes: Lanes, rows: Rows) -> list[Block]:
    """The longest chain of a step, last block first: runs without a pause, linked by messages. No rank may hang."""
    clock = Clock(lanes, rows, traced=True)
    assert clock.ends is not None
    maker = {target: lane for lane, target in enumerate(lanes.goes_to) if target >= 0}
    places: dict[int, list[int]] = {lane: [] for lane in range(len(lanes.seconds))}
    for row in rows:
        for index, lane in enumerate(row):
            places[lane].append(index)
    pp_rank = max(range(len(rows)), key=clock.ends.__getitem__)
    blocks: list[Block] = []
    last = index = len(rows[pp_rank]) - 1
    while index >= 0:
        mb = clock.waits[pp_rank][index]
        if mb < 0:
            index -= 1
            continue
        blocks.append((pp_rank, index, last))
        made_by = maker[rows[pp_rank][index]]
        pp_rank = lanes.rank_of[made_by // KINDS]
        last = index = places[made_by][mb]
    return [*blocks, (pp_rank, 0, last)]
