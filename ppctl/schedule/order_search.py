"""A schedule for given costs and a given memory, found by search.

Deterministic: work is counted, never timed, and chance comes from a fixed seed.

The search is over orders: for every pp_rank, the order in which it works on the F, I and W of its stages, with
microbatches in order. There is no formula for the best order, but a rule that picks the next action whenever a rank is
free (`list_scheduler`) makes a good one in milliseconds. So the search goes through rules, and through costs that the
rule sees in place of the real ones: with shorter messages it waits for arriving work, with longer ones it runs further
ahead, and with slightly wrong stage times it makes other, sometimes better, repeating patterns ("problem-space search";
Storer, Wu and Vaccari, Management Science 38, 1992). It has three parts:

1. Starts: every named schedule, as it is and with its Ws placed anew, and one rule after another.
2. From the best of these, one thing at a time is changed: the rule, the costs that it sees, the memory that it uses.
3. Single entries of the best order are moved, most of them along its critical path, by simulated annealing. This is
   what finds the optimum of short steps; of long ones it changes little, and little of the allowance is left for it.

Every order is judged at the real costs. Named schedules that fit are among the candidates, so the result is never
slower. The search ends at the bound (`Lanes.bound`) or when the allowance is used up.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp
from random import Random
from typing import NamedTuple

from ppctl.errors import Problem, ScheduleError
from ppctl.schedule.action import Schedule
from ppctl.schedule.lane_orders import (
    KINDS,
    ROUNDING,
    Block,
    Clock,
    Lanes,
    Rows,
    Task,
    check_limits,
    critical_blocks,
    least_limits,
    named_schedules,
    rows_of,
    schedule_of,
)
from ppctl.schedule.list_scheduler import First, OrderByRule, Rule, WeightsPlaced
from ppctl.schedule.policies import AUTO
from ppctl.schedule.simulate import simulate
from ppctl.schedule.trace import longest_span, step_time

ALLOWANCE = 5_000_000
"""Units of work of one search, about half a microsecond each: simulating one entry of one order is one unit."""

_LIST_UNITS, _PLACE_UNITS = 12, 10
"""Units of an entry that a rule picks, and of one whose Ws are placed."""

_LEAST_POINTS, _MOST_POINTS = 8, 400
"""(least, most) rules that are tried, for long and for short steps."""

_KEPT = 4
"""How many of the best points are changed."""

_ROUNDS, _MOVES = 8, 500
"""How often annealing starts from the best order, and the most moves of each start: enough to exhaust short steps."""

_WARMTH = 0.5
"""How much longer than the present order a new one may be, in mean actions, for annealing to go on from it at first."""

_REACH, _DRAWS = 4, 20
"""The most places that an entry moves within its row, and the most moves drawn until one is sound."""

_LATE = (0.0, 0.5, 1.0)


class Named(NamedTuple):
    """A named schedule and its simulated step."""

    schedule: Schedule
    seconds: float
    span: float
    """The longest time from a rank's first start to its last end."""


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """The result of a search. The schedule is compute-only; a named schedule keeps its name."""

    schedule: Schedule
    seconds: float
    """Seconds of the schedule's simulated step."""
    bound: float
    """A lower bound on the seconds of any order of this placement."""
    named: tuple[Named, ...]
    """The named schedules of this placement that fit the same memory, the fastest first."""
    tried: int
    """The number of orders simulated, or given up while they were made."""
    held: tuple[float, ...]
    """The peak of every pp_rank, in the task's unit."""

    @property
    def best_named(self) -> Named | None:
        """The fastest named schedule that fits, if there is one."""
        return self.named[0] if self.named else None


class _Value(NamedTuple):
    """The value of an order: its step relative to the bound, rounded, so that equal steps compare equal."""

    step: float
    span: float
    ends: float
    """The sum of the ranks' ends: if it falls, the step may follow."""


@dataclass(frozen=True, slots=True)
class _Point:
    """One way to make an order: a rule, and the costs and limits that it sees in place of the real ones."""

    rule: Rule
    message: float = 1.0
    """The factor on message times."""
    even: float = 0.0
    """0: stages as they are; 1: all alike."""
    memory: float = 1.0
    """The share that is used of the limit beyond the least that any order needs."""
    noise: float = 0.0
    """The largest error of a lane's time, as a share of it."""
    seed: int = 0


def find_schedule(task: Task, allowance: int = ALLOWANCE) -> FoundSchedule:
    """Search for a task's schedule. `allowance` is in units of work (`ALLOWANCE`). Raises ScheduleError (PP-E321) if a
    limit has no room for one microbatch on all stages of its rank."""
    check_limits(task)
    return _OrderSearch(task, allowance).run()


def first_order(task: Task) -> Schedule | None:
    """The order that the first rule makes; None if a limit has no room for it."""
    lanes = Lanes.of(task)
    rows = OrderByRule(lanes, Rule(), lanes.limits).made()
    return None if rows is None else schedule_of(rows, lanes, AUTO)


def find_best(tasks: Sequence[Task], allowance: int = ALLOWANCE) -> FoundSchedule:
    """The schedule with the shortest step of several tasks, which share the allowance; of equal ones the first. Tasks
    whose limit has no room for a microbatch are left out. Raises ScheduleError (PP-E321) if none is left."""
    results: list[FoundSchedule] = []
    refused: list[Problem] = []
    for task in tasks:
        try:
            results.append(find_schedule(task, allowance // len(tasks)))
        except ScheduleError as error:
            refused += error.problems
    if not results:
        raise ScheduleError(refused)
    least = min(each.seconds for each in results) * (1 + ROUNDING)
    return next(each for each in results if each.seconds <= least)


class _OrderSearch:
    def __init__(self, task: Task, allowance: int) -> None:
        self.task = task
        self.lanes = Lanes.of(task)
        self.least = least_limits(task.placement, task.sizes, task.deferred)
        self.length = len(self.lanes.seconds) * task.num_microbatches
        self.bound = self.lanes.bound()
        self.unit = self.bound or 1.0
        first = self.lanes.firsts()
        self.begins = [min(first[KINDS * stage] for stage in stages) for stages in self.lanes.stages_of]
        """When each pp_rank's first forward can start."""
        self.warmth = _WARMTH * sum(self.lanes.seconds) / len(self.lanes.seconds) / self.unit
        self.left = allowance
        self.tried = 0
        self.random = Random(0)
        self.points: set[_Point] = set()
        self.best: list[tuple[_Value, int, _Point]] = []
        """The best points, each with its value and its number."""
        self.rows: Rows | None = None
        self.value = _Value(float("inf"), 0.0, 0.0)

    def run(self) -> FoundSchedule:
        named = self._start_with_names()
        self._start_with_rules()
        self._change_points(self.left // 2)
        self._change_order()
        return self._found(named)

    @property
    def at_bound(self) -> bool:
        return self.value.step <= 1.0

    def judge(self, rows: Rows) -> _Value | None:
        """The value of an order; None if it hangs."""
        self.left -= self.length
        self.tried += 1
        ends = Clock(self.lanes, rows).ends
        if ends is None:
            return None
        ends = [end + sums for end, sums in zip(ends, self.lanes.sums, strict=True)]
        span = max(end - begin for end, begin in zip(ends, self.begins, strict=True))
        return _Value(self._relative(max(ends)), self._relative(span), sum(ends))

    def _relative(self, seconds: float) -> float:
        return round(seconds / self.unit, 9)

    def consider(self, rows: Rows | None) -> _Value | None:
        """Judge an order that fits, keep it if it is the best so far, and return its value; None if it hangs."""
        if rows is None or (value := self.judge(rows)) is None:
            return None
        if value < self.value:
            self.rows, self.value = rows, value
        return value

    def placed_anew(self, rows: Rows) -> None:
        """Consider the same order of F and I with Ws placed anew by several rules."""
        for late in _LATE:
            self.left -= _PLACE_UNITS * self.length
            latest = self.value.step * self.unit * (1 + 2 * ROUNDING)
            placed = WeightsPlaced(self.lanes, rows, late, latest).made()
            self.tried += placed is None
            self.consider(placed)

    def _start_with_names(self) -> list[Named]:
        """Consider all named schedules; returns those that fit."""
        fitting = []
        for schedule in named_schedules(self.task):
            rows = rows_of(schedule)
            if rows is None:
                continue
            if self.lanes.fit(rows):
                trace = simulate(schedule, self.task.costs)
                fitting.append(Named(schedule, step_time(trace), longest_span(trace)))
                self.consider(rows)
            self.placed_anew(rows)
        return fitting

    def _start_with_rules(self) -> None:
        """Try every first rule at four kinds of costs; then all rules with one field other than the best's."""
        for message, even in ((0.0, 0.0), (1.0, 0.0), (2.0, 0.0), (1.0, 1.0)):
            for first in First:
                self._try_point(_Point(Rule(first), message, even))
        for _, _, point in tuple(self.best):
            for rule in _other_rules(point.rule):
                self._try_point(replace(point, rule=rule))

    def _change_points(self, until: int) -> None:
        """Change one thing at a time in one of the best points, until only `until` of the allowance is left."""
        while self.left > until and len(self.points) < _MOST_POINTS and not self.at_bound:
            rank = min(int(self.random.expovariate(1.0)), len(self.best) - 1)
            self._try_point(self._changed(self.best[rank][2]))

    def _try_point(self, point: _Point) -> None:
        """Consider a point's order and, if it is nearly the best, also that order with its Ws placed anew."""
        number = len(self.points)
        if point in self.points or (self.left <= 0 and number >= _LEAST_POINTS):
            return
        self.points.add(point)
        self.left -= _LIST_UNITS * self.length
        rows = OrderByRule(self._perturbed(point), point.rule, self._limits(point)).made()
        if rows is None or (value := self.consider(rows)) is None:
            return
        insort(self.best, (value, number, point))
        del self.best[_KEPT:]
        if value.step <= 1.02 * self.value.step and not self.at_bound:
            self.placed_anew(rows)

    def _perturbed(self, point: _Point) -> Lanes:
        """The lanes with the costs that the point's rule sees."""
        stretch = None
        if point.noise:
            chance = Random(point.seed)
            stretch = [1.0 + point.noise * chance.uniform(-1.0, 1.0) for _ in self.lanes.seconds]
        return self.lanes.altered(point.message, point.even, stretch)

    def _limits(self, point: _Point) -> list[float]:
        pairs = zip(self.least, self.lanes.limits, strict=True)
        return [least + point.memory * (limit - least) for least, limit in pairs]

    def _changed(self, point: _Point) -> _Point:
        """Return a point with one random change: of its rule, or of the costs or the memory that its rule sees."""
        chance = self.random
        rule = point.rule
        kind = chance.randrange(6)
        if kind == 0:
            return replace(point, rule=chance.choice(_other_rules(rule)))
        if kind == 1:
            return replace(point, message=chance.choice((0.0, 0.5, 1.0, 1.5, 2.0, 3.0)))
        if kind == 2:
            return replace(point, even=chance.choice((0.0, 0.25, 0.5, 1.0)))
        if kind == 3:
            return replace(point, memory=chance.choice((0.4, 0.6, 0.8, 0.9, 1.0)))
        return replace(point, noise=chance.choice((0.02, 0.05, 0.1, 0.2, 0.4)), seed=chance.randrange(1 << 30))

    def _change_order(self) -> None:
        """Anneal from the best order, several times."""
        for _ in range(_ROUNDS):
            moves = min(_MOVES, self.left // self.length)
            if self.rows is None or self.at_bound or moves <= 0:
                return
            self._anneal(self.rows, self.value, moves)

    def _anneal(self, rows: Rows, value: _Value, moves: int) -> None:
        """Simulated annealing from these rows: keep a move if the step gets faster, else with some probability."""
        blocks = critical_blocks(self.lanes, rows)
        for number in range(moves):
            warmth = self.warmth * (1.0 - number / moves) ** 2 + ROUNDING
            changed = self._neighbour(rows, blocks)
            reached = None if changed is None else self.judge(changed)
            if changed is None or reached is None:
                continue
            if reached <= value or self.random.random() < exp((value.step - reached.step) / warmth - 0.1):
                rows, value = changed, reached
                blocks = critical_blocks(self.lanes, rows)
                if value < self.value:
                    self.rows, self.value = rows, value
                    if self.at_bound:
                        return

    def _neighbour(self, rows: Rows, blocks: Sequence[Block]) -> Rows | None:
        """The rows with one entry moved, every other time one of the critical path; None if no sound move was found."""
        chance = self.random
        for _ in range(_DRAWS):
            if chance.random() < 0.5:
                pp_rank, first, last = chance.choice(blocks)
                take = chance.randint(first, last)
                put = chance.choice((first - 1, first, last, last + 1, take + chance.randint(-_REACH, _REACH)))
            else:
                pp_rank = chance.randrange(len(rows))
                take = chance.randrange(len(rows[pp_rank]))
                put = take + chance.randint(-_REACH, _REACH)
            changed = self._moved(rows, pp_rank, take, min(max(put, 0), len(rows[pp_rank]) - 1))
            if changed is not None:
                return changed
        return None

    def _moved(self, rows: Rows, pp_rank: int, take: int, put: int) -> Rows | None:
        """The rows with one entry elsewhere in its row; None if that changes nothing, or the row is not sound."""
        row = list(rows[pp_rank])
        row.insert(put, row.pop(take))
        if row == rows[pp_rank] or not self.lanes.sound(pp_rank, row):
            return None
        return [*rows[:pp_rank], row, *rows[pp_rank + 1 :]]

    def _found(self, named: list[Named]) -> FoundSchedule:
        """The result with the best order as a schedule, or with a named schedule that is as fast."""
        # Rounded, so that times that differ only by rounding compare equal: then the first is taken, and `named` lists
        # schedules with whole backwards before those with split ones.
        ranked = tuple(sorted(named, key=lambda each: (self._relative(each.seconds), self._relative(each.span))))
        assert self.rows is not None  # a rule always makes one
        schedule = schedule_of(self.rows, self.lanes, AUTO)
        trace = simulate(schedule, self.task.costs)
        seconds, span = step_time(trace), longest_span(trace)
        if ranked and (best := ranked[0]).seconds <= seconds * (1 + ROUNDING):
            slower = best.seconds < seconds * (1 - ROUNDING)
            if slower or best.span <= span * (1 + ROUNDING):
                schedule, seconds = best.schedule, best.seconds
        held = self.lanes.peaks(rows_of(schedule) or self.rows)
        return FoundSchedule(schedule, seconds, self.bound, ranked, self.tried, tuple(held))


def _other_rules(rule: Rule) -> list[Rule]:
    """The rules that differ from this one in one field."""
    others = [replace(rule, first=first) for first in First]
    others += [replace(rule, alternate=not rule.alternate), replace(rule, make_room=not rule.make_room)]
    others += [replace(rule, late_weights=late) for late in _LATE]
    others += [replace(rule, late_forward=late) for late in _LATE]
    return [other for other in others if other != rule]
