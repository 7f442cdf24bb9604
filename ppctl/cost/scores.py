"""How good a layout looks without simulation: what its stages and ranks take, and what its devices hold.

Knows prices of stages (asked through `price`) and the order of a schedule's F, B and W. Must not know where prices come
from, nor how layouts are found. A search asks many thousand times: what was looked up is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from ppctl.cost.candidates import Candidate
from ppctl.schedule.action import LIFE_ENDS, Action, F, Schedule


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


class Score(NamedTuple):
    """How good a candidate looks; less is better."""

    excess: int
    """Bytes over the limit."""
    slowest_rank: float
    slowest_stage: float
    spread: float


class _Rank(NamedTuple):
    """A pp_rank: its stages, and how many activations of each are alive at once, for every moment that may be worst."""

    stages: tuple[int, ...]
    alive: tuple[tuple[int, ...], ...]


class Scores:
    """Judges candidates for one schedule; `limit` is bytes of a device."""

    def __init__(self, schedule: Schedule, price: Price, limit: int | None) -> None:
        place = schedule.placement
        stages = [place.stages_of(pp_rank) for pp_rank in range(place.pp)]
        self._ranks = [_Rank(own, worst_moments(row, own)) for own, row in zip(stages, schedule.actions, strict=True)]
        self._price = price
        self._limit = limit
        self._prices: dict[tuple[int, int, int, bool], StagePrice] = {}
        self._seconds: dict[tuple[int, int, int, bool], float] = {}
        self._held: dict[tuple[tuple[int, ...], tuple[StagePrice, ...]], int] = {}

    def of(self, stage: int, first: int = 0, count: int = 0, mtp: bool = False) -> StagePrice:
        """The price of one stage."""
        key = (stage, first, count, mtp)
        if key not in self._prices:
            self._prices[key] = self._price(*key)
        return self._prices[key]

    def stage_prices(self, candidate: Candidate) -> list[StagePrice]:
        """The prices of all stages."""
        firsts = accumulate(candidate.counts, initial=0)
        return [
            self.of(stage, first, count, stage == candidate.mtp_stage)
            for stage, (first, count) in enumerate(zip(firsts, candidate.counts, strict=False))
        ]

    def stage_seconds(self, candidate: Candidate) -> list[float]:
        """The same, time alone."""
        first, times, known = 0, [], self._seconds
        for stage, count in enumerate(candidate.counts):
            key = (stage, first, count, stage == candidate.mtp_stage)
            if (seconds := known.get(key)) is None:
                seconds = known[key] = self.of(*key).seconds
            times.append(seconds)
            first += count
        return times

    def rank_seconds(self, times: Sequence[float]) -> list[float]:
        """What each pp_rank takes for a microbatch, of the times of its stages."""
        return [sum(map(times.__getitem__, rank.stages)) for rank in self._ranks]

    def peak(self, prices: Sequence[StagePrice]) -> int:
        """Bytes on the device of the fullest pp_rank."""
        return max(self._held_by(rank, prices) for rank in self._ranks)

    def excess(self, peak: int) -> int:
        """Of a peak, the bytes over the limit."""
        return 0 if self._limit is None else max(0, peak - self._limit)

    def score(self, candidate: Candidate) -> Score:
        """The candidate's score."""
        times = self.stage_seconds(candidate)
        excess = self.excess(self.peak(self.stage_prices(candidate))) if self._limit is not None else 0
        return Score(excess, max(self.rank_seconds(times)), max(times), sum(map(mul, times, times)))

    def promise(self, candidate: Candidate) -> tuple[Score, Candidate]:
        """What candidates are sorted by."""
        return self.score(candidate), candidate

    def burdened(self, candidate: Candidate) -> list[int]:
        """The stages whose layers should go elsewhere: of the slowest rank, the slowest, of the fullest device."""
        prices, times = self.stage_prices(candidate), self.stage_seconds(candidate)
        slowest = max(self._ranks, key=lambda rank: sum(map(times.__getitem__, rank.stages)))
        stages = {*slowest.stages, max(range(len(times)), key=times.__getitem__)}
        if self._limit is not None:
            stages.update(max(self._ranks, key=lambda rank: self._held_by(rank, prices)).stages)
        return sorted(stages)

    def _held_by(self, rank: _Rank, prices: Sequence[StagePrice]) -> int:
        """Bytes on a rank's device at its worst moment. Most layouts differ on few ranks."""
        own = tuple(map(prices.__getitem__, rank.stages))
        key = (rank.stages, own)
        if key not in self._held:
            kept = [price.activation for price in own]
            worst = max(int(sum(map(mul, alive, kept))) for alive in rank.alive)
            self._held[key] = sum(price.state for price in own) + worst
        return self._held[key]


def worst_moments(row: Sequence[Action], stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """How many activations of each stage are alive, for every moment that no other exceeds in all stages."""
    position = {stage: index for index, stage in enumerate(stages)}
    alive = [0] * len(stages)
    seen: set[tuple[int, ...]] = {tuple(alive)}
    for op, stage, _ in row:
        if op is F:
            alive[position[stage]] += 1
            seen.add(tuple(alive))
        elif op in LIFE_ENDS:
            alive[position[stage]] -= 1
    kept: list[tuple[int, ...]] = []
    for moment in sorted(seen, reverse=True):
        if not any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in kept):
            kept.append(moment)
    return tuple(kept)
