"""The layout that a schedule runs fastest: a search over how many layers every stage holds.

Knows what a stage costs (asked through `price`), the schedule's order and the memory of a device. Must not know where
prices come from. A candidate is a number of decoder layers for each stage (E in the first, L in the last; a stage may
hold nothing else, or nothing at all) and the stage of the MTP layers. Deterministic: work is counted, never timed.

Two descents. The first moves single layers between stages while the slowest rank gets faster (then the slowest stage):
that ignores the order of work and needs no simulation. The second tries neighbours of what it finds, most promising
first, by simulating the step, and stops when the best few have no better one or the allowance is used up.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

from ppctl.layout.rules import even_counts
from ppctl.schedule.action import Action, Op, Schedule
from ppctl.schedule.executor import execute
from ppctl.schedule.simulate import Costs

ALLOWANCE = 2_000_000
"""Actions that one search may simulate: two to three seconds. Finalists of long steps are as many actions again, and
looking once at all neighbours of a layout of 128 stages takes a second more."""

NEIGHBOURS = 24
"""How many neighbours of the best layout are simulated before it is taken for a minimum."""

_PATIENCE = 4
"""How many layouts, the best first, may have no better neighbour before the search ends."""

_FINALISTS = 6
"""How many of the best are simulated with all their microbatches in the end."""

_SETTLED = 2
"""Rounds of the pipeline after which every further microbatch takes as long as the slowest rank."""


class StagePrice(NamedTuple):
    """What a stage takes for one microbatch, in seconds, and holds on one device, in bytes."""

    forward: float
    input_gradient: float
    weight_gradient: float
    state: int
    """Weights, gradients, optimizer."""
    activation: int
    """What one microbatch keeps from its F to its B."""

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward + self.input_gradient + self.weight_gradient


Price = Callable[[int, int, int, bool], StagePrice]
"""`price(stage, first, count, mtp)` of a stage with decoder layers first .. first + count - 1, and MTP or not."""


class Candidate(NamedTuple):
    """A layout: decoder layers by stage, and the stage of the MTP layers (-1: the model has none)."""

    counts: tuple[int, ...]
    mtp_stage: int


@dataclass(frozen=True, slots=True)
class Found:
    """A candidate and what it comes to."""

    candidate: Candidate
    step_time: float
    """Seconds."""
    peak: int
    """Bytes on the device of the fullest pp_rank."""


@dataclass(frozen=True, slots=True)
class Balance:
    """The best layout, the next best, the even split beside it, and how many were simulated."""

    best: Found
    runner_up: Found | None
    even: Found
    simulated: int


class _Rank(NamedTuple):
    """A pp_rank: its stages, and how many activations of each are alive at once, for every moment that may be worst."""

    stages: tuple[int, ...]
    alive: tuple[tuple[int, ...], ...]


class _Score(NamedTuple):
    """How good a candidate looks without simulation; less is better."""

    excess: int
    slowest_rank: float
    slowest_stage: float
    spread: float


def balance(
    num_layers: int,
    has_mtp: bool,
    schedule: Schedule,
    price: Price,
    *,
    message: float = 0.0,
    limit: int | None = None,
) -> Balance:
    """Search. `schedule` may be lowered; `message` is seconds per message; `limit` is bytes of a device.

    Where nothing fits into `limit`, the best is what exceeds it least.
    """
    return _Search(num_layers, has_mtp, schedule, price, message, limit).run()


class _Search:
    def __init__(
        self, num_layers: int, has_mtp: bool, schedule: Schedule, price: Price, message: float, limit: int | None
    ) -> None:
        place = schedule.placement
        self.num_layers = num_layers
        self.last = place.num_stages - 1
        self.schedule = schedule
        self.message = message
        self.limit = limit
        self.price = price
        self.mtp_stages = range(place.num_stages - place.pp, place.num_stages) if has_mtp else range(-1, 0)
        self.ranks = [_Rank(place.stages_of(r), worst_moments(schedule.actions[r], place.stages_of(r)))
                      for r in range(place.pp)]  # fmt: skip
        self.short, self.left_out = _shortened(schedule)
        self.weight = sum(map(len, self.short.actions))
        self.found: dict[Candidate, Found] = {}
        self.prices: dict[tuple[int, int, int, bool], StagePrice] = {}
        self.seconds: dict[tuple[int, int, int, bool], float] = {}
        self.bytes_held: dict[tuple[tuple[int, ...], tuple[StagePrice, ...]], int] = {}

    def run(self) -> Balance:
        even = self.simulated(self.even())
        starts = {self.descended(start) for start in self.starts()}
        for candidate in (*sorted(starts, key=self.promise), *sorted(self.plain(), key=self.promise)):
            if self.spent < ALLOWANCE // 2:
                self.simulated(candidate)
        tried: set[Candidate] = set()
        fruitless = 0
        while fruitless < _PATIENCE and self.spent < ALLOWANCE:
            before = self.best()
            open_ = [found for found in self.found.values() if found.candidate not in tried]
            if not open_:
                break
            around = min(open_, key=self.order).candidate
            tried.add(around)
            for candidate in self.neighbours(around):
                if self.spent < ALLOWANCE:
                    self.simulated(candidate)
            fruitless = 0 if self.best() != before else fruitless + 1
        ranked = sorted(self.found.values(), key=self.order)
        final = sorted(map(self.in_full, ranked[: self.finalists()]), key=self.order)
        return Balance(final[0], final[1] if len(final) > 1 else None, self.in_full(even), len(ranked))

    def finalists(self) -> int:
        """How many may be simulated in full: fewer where steps are very long, but two."""
        return max(2, min(_FINALISTS, ALLOWANCE // 2 // sum(map(len, self.schedule.actions))))

    @property
    def spent(self) -> int:
        """Actions simulated so far."""
        return self.weight * len(self.found)

    def order(self, found: Found) -> tuple[int, float, int, Candidate]:
        """Least excess of memory, then least time, then least memory."""
        return (self.excess(found.peak), found.step_time, found.peak, found.candidate)

    def best(self) -> Found:
        return min(self.found.values(), key=self.order)

    def excess(self, peak: int) -> int:
        return 0 if self.limit is None else max(0, peak - self.limit)

    # Starting points

    def even(self) -> Candidate:
        counts = even_counts(self.num_layers, self.last + 1)
        return Candidate(counts, self.mtp_stages[-1])

    def starts(self) -> Iterator[Candidate]:
        """Stages filled to a bound, for every home of the MTP layers; for the last, even shares of time or layers."""
        for home in self.mtp_stages:
            counted: list[Sequence[int]] = [self.filled(home)]
            if home in (-1, self.last - 1, self.last):
                counted += [self.shares(home), even_counts(self.num_layers, self.last + 1)]
            for counts in counted:
                candidate = Candidate(tuple(counts), home)
                yield candidate if self.legal(candidate) else Candidate(self.pushed_before(candidate), home)

    def plain(self) -> Iterator[Candidate]:
        """What a person would write: some layers beside E and at the end, even shares between, the last few empty."""
        stages = self.last + 1
        most = min(self.num_layers, -(-self.num_layers // stages) + 1)
        for home, empty in product(self.mtp_stages[-2:], range(3)):
            for first, final in product(range(most + 1), repeat=2):
                middle = stages - 2 - empty
                if middle < 1 or first + final > self.num_layers:
                    continue
                between = even_counts(self.num_layers - first - final, middle)
                for inner in dict.fromkeys((between, between[::-1])):
                    candidate = Candidate((first, *inner, final, *[0] * empty), home)
                    if self.legal(candidate):
                        yield candidate

    def promise(self, candidate: Candidate) -> tuple[_Score, Candidate]:
        return self.score(candidate), candidate

    def shares(self, home: int) -> list[int]:
        """Cuts where the time so far comes closest to the stage's share of the whole."""
        ends = list(accumulate(self.of(i, 1, 1, False).seconds for i in range(self.num_layers)))
        before, after, mtp = self.extra(0), self.extra(self.last), self.of(0, 0, 1, True).seconds if home >= 0 else 0.0
        share = (before + after + mtp + (ends[-1] if ends else 0.0)) / (self.last + 1)
        cuts = [0]
        for stage in range(self.last):
            wanted = share * (stage + 1) - before - (mtp if 0 <= home <= stage else 0.0)
            cuts.append(max(cuts[-1], min(self.num_layers, bisect_right(ends, wanted + 0.5 * share / (self.last + 1)))))
        return [b - a for a, b in zip(cuts, [*cuts[1:], self.num_layers], strict=True)]

    def filled(self, home: int) -> list[int]:
        """The least bound on a stage's time under which stages filled one after another hold all layers."""
        low, high = 0.0, sum(self.of(i, 1, 1, False).seconds for i in range(self.num_layers)) + self.extra(self.last)
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (low, middle) if sum(self.fill(middle, home)) == self.num_layers else (middle, high)
        counts = self.fill(high, home)
        counts[0] += self.num_layers - sum(counts)
        return counts

    def fill(self, bound: float, home: int) -> list[int]:
        first, counts = 0, []
        for stage in range(self.last + 1):
            count = 0
            # Behind the MTP layers no decoder layer may stand.
            while first + count < self.num_layers and not 0 <= home < stage:
                if self.of(first, count + 1, stage, stage == home).seconds > bound:
                    break
                count += 1
            counts.append(count)
            first += count
        return counts

    def extra(self, stage: int) -> float:
        return self.of(0, 0, stage, False).seconds

    def legal(self, candidate: Candidate) -> bool:
        home = candidate.mtp_stage
        return home < 0 or not any(candidate.counts[home + 1 :])

    def pushed_before(self, candidate: Candidate) -> tuple[int, ...]:
        """The counts, with what stands behind the MTP layers spread over the stages before."""
        counts, home = list(candidate.counts), candidate.mtp_stage
        behind = sum(counts[home + 1 :])
        counts[home + 1 :] = [0] * (self.last - home)
        more = even_counts(behind, home + 1)
        return tuple(count + (more[stage] if stage <= home else 0) for stage, count in enumerate(counts))

    # Without simulation

    def of(self, first: int, count: int, stage: int, mtp: bool) -> StagePrice:
        key = (stage, first, count, mtp)
        if key not in self.prices:
            self.prices[key] = self.price(*key)
        return self.prices[key]

    def stage_prices(self, candidate: Candidate) -> list[StagePrice]:
        firsts = [0, *accumulate(candidate.counts)]
        return [
            self.of(firsts[stage], count, stage, stage == candidate.mtp_stage)
            for stage, count in enumerate(candidate.counts)
        ]

    def stage_seconds(self, candidate: Candidate) -> list[float]:
        """The same, time alone: a search asks this many thousand times."""
        first, times, known = 0, [], self.seconds
        for stage, count in enumerate(candidate.counts):
            key = (stage, first, count, stage == candidate.mtp_stage)
            if (seconds := known.get(key)) is None:
                seconds = known[key] = self.of(first, count, stage, key[3]).seconds
            times.append(seconds)
            first += count
        return times

    def peak(self, prices: Sequence[StagePrice]) -> int:
        return max(self.held(rank, prices) for rank in self.ranks)

    def held(self, rank: _Rank, prices: Sequence[StagePrice]) -> int:
        """Bytes on a rank's device at its worst moment. Most layouts differ on few ranks: what is known is kept."""
        own = tuple(map(prices.__getitem__, rank.stages))
        key = (rank.stages, own)
        if key not in self.bytes_held:
            kept = [price.activation for price in own]
            worst = max(int(sum(map(mul, alive, kept))) for alive in rank.alive)
            self.bytes_held[key] = sum(price.state for price in own) + worst
        return self.bytes_held[key]

    def score(self, candidate: Candidate) -> _Score:
        times = self.stage_seconds(candidate)
        ranks = [sum(map(times.__getitem__, rank.stages)) for rank in self.ranks]
        excess = self.excess(self.peak(self.stage_prices(candidate))) if self.limit is not None else 0
        return _Score(excess, max(ranks), max(times), sum(map(mul, times, times)))

    def moves(self, candidate: Candidate, sources: Iterable[int] | None = None) -> Iterator[Candidate]:
        """One decoder layer from a stage to another (those between shift), or the MTP layers to another stage."""
        counts, home = candidate
        for source in range(self.last + 1) if sources is None else sources:
            if counts[source] == 0:
                continue
            for target in range(self.last + 1):
                if target != source and not 0 <= home < target:
                    moved = list(counts)
                    moved[source] -= 1
                    moved[target] += 1
                    yield Candidate(tuple(moved), home)
        for other in self.mtp_stages:
            if other != home and self.legal(moved_home := Candidate(counts, other)):
                yield moved_home

    def descended(self, candidate: Candidate) -> Candidate:
        """The local minimum of the score, reached by layers that leave the slowest rank, stage or fullest device."""
        score = self.score(candidate)
        while True:
            moves = self.moves(candidate, self.burdened(candidate))
            best = min(moves, key=self.promise, default=candidate)
            if (better := self.score(best)) >= score:
                return candidate
            candidate, score = best, better

    def burdened(self, candidate: Candidate) -> list[int]:
        """The stages whose layers should go elsewhere."""
        prices = self.stage_prices(candidate)
        slowest = max(self.ranks, key=lambda rank: sum(prices[stage].seconds for stage in rank.stages))
        stages = {*slowest.stages, max(range(self.last + 1), key=lambda stage: prices[stage].seconds)}
        if self.limit is not None:
            stages.update(max(self.ranks, key=lambda rank: self.held(rank, prices)).stages)
        return sorted(stages)

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """The most promising by score, and by how even the stages are: in a short step that counts for more."""
        fresh = [(self.score(move), move) for move in self.moves(candidate) if move not in self.found]
        by_score = sorted(fresh)[: NEIGHBOURS // 2]
        by_spread = sorted(fresh, key=lambda scored: (scored[0].excess, scored[0].spread, scored[1]))[: NEIGHBOURS // 2]
        return [move for _, move in dict.fromkeys((*by_score, *by_spread))]

    # With simulation

    def simulated(self, candidate: Candidate) -> Found:
        """The step simulated, with microbatches beyond the settled ones at the slowest rank's pace."""
        if candidate not in self.found:
            prices = self.stage_prices(candidate)
            pace = max(sum(prices[stage].seconds for stage in rank.stages) for rank in self.ranks)
            seconds = _step_time(self.short, prices, self.message) + self.left_out * pace
            self.found[candidate] = Found(candidate, seconds, self.peak(prices))
        return self.found[candidate]

    def in_full(self, found: Found) -> Found:
        """The same with every microbatch simulated."""
        if not self.left_out:
            return found
        return replace(found, step_time=_step_time(self.schedule, self.stage_prices(found.candidate), self.message))


def _step_time(schedule: Schedule, prices: Sequence[StagePrice], message: float) -> float:
    costs = Costs(
        forward=[price.forward for price in prices],
        backward=[price.input_gradient + price.weight_gradient for price in prices],
        input_gradient=[price.input_gradient for price in prices],
        weight_gradient=[price.weight_gradient for price in prices],
    )
    return max(ends[-1] for ends in execute(schedule, costs.seconds(), lambda _: message).ends if ends)


def _shortened(schedule: Schedule) -> tuple[Schedule, int]:
    """The schedule with so few microbatches that it settles only just, and how many were left out.

    The middle of a step repeats itself: what is left out are whole rounds of the pipeline between its ends.
    """
    pp = schedule.placement.pp
    rounds = (schedule.num_microbatches - 2 * _SETTLED * pp) // pp
    if rounds <= 0:
        return schedule, 0
    kept = schedule.num_microbatches - rounds * pp
    half = (kept // (2 * pp)) * pp

    def renumbered(row: Sequence[Action]) -> tuple[Action, ...]:
        end = half + rounds * pp
        return tuple(
            a if a.mb < half else Action(a.op, a.stage, a.mb - rounds * pp) for a in row if a.mb < half or a.mb >= end
        )

    return replace(schedule, num_microbatches=kept, actions=tuple(map(renumbered, schedule.actions))), rounds * pp


def worst_moments(row: Sequence[Action], stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """How many activations of each stage are alive, for every moment that no other exceeds in all stages."""
    position = {stage: index for index, stage in enumerate(stages)}
    alive = [0] * len(stages)
    seen: set[tuple[int, ...]] = {tuple(alive)}
    split = any(action.op is Op.W for action in row)
    for op, stage, _ in row:
        if op is Op.F:
            alive[position[stage]] += 1
            seen.add(tuple(alive))
        elif op is Op.B or (split and op is Op.W):
            alive[position[stage]] -= 1
    kept: list[tuple[int, ...]] = []
    for moment in sorted(seen, reverse=True):
        if not any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
