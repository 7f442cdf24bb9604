"""The candidates of a search for a layout, and their scores without simulation.

A candidate is the number of decoder layers by stage, and the stage of the MTP layers; E is in the first stage and L in
the last. A search needs a price many thousand times, so prices are cached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, product
from operator import mul
from typing import NamedTuple

from ppctl.layout.rules import even_counts
from ppctl.plan.types import StageCost
from ppctl.schedule.action import Schedule


class Candidate(NamedTuple):
    """A layout: decoder layers by stage, and the stage of the MTP layers (-1: the model has none)."""

    counts: tuple[int, ...]
    mtp_stage: int

    @property
    def legal(self) -> bool:
        """Whether no decoder layer stands after the MTP layers."""
        return self.mtp_stage < 0 or not any(self.counts[self.mtp_stage + 1 :])

    def pushed_before(self) -> Candidate:
        """A legal candidate, with decoder layers after the MTP layers spread over the stages before these."""
        front, behind = self.counts[: self.mtp_stage + 1], self.counts[self.mtp_stage + 1 :]
        more = even_counts(sum(behind), len(front))
        return self._replace(counts=(*(a + b for a, b in zip(front, more, strict=True)), *(0 for _ in behind)))


@dataclass(frozen=True, slots=True)
class Space:
    """All candidates for a model and a pipeline."""

    num_layers: int
    num_stages: int
    homes: range
    """The stages that may hold the MTP layers: -1 alone if the model has none."""

    def even(self) -> Candidate:
        """The candidate whose stages have the most even numbers of layers, with the MTP layers in the last stage that
        may hold them."""
        return Candidate(even_counts(self.num_layers, self.num_stages), self.homes[-1])

    def plain(self) -> Iterator[Candidate]:
        """Candidates as people write them: some layers beside E and in the last stage with layers, even shares between
        these two, and up to two empty stages at the end."""
        most = min(self.num_layers, -(-self.num_layers // self.num_stages) + 1)
        for home, empty in product(self.homes[-2:], range(3)):
            for first, final in product(range(most + 1), repeat=2):
                middle = self.num_stages - 2 - empty
                if middle < 1 or first + final > self.num_layers:
                    continue
                between = even_counts(self.num_layers - first - final, middle)
                for inner in dict.fromkeys((between, between[::-1])):
                    candidate = Candidate((first, *inner, final, *[0] * empty), home)
                    if candidate.legal:
                        yield candidate

    def moves(self, candidate: Candidate, sources: Iterable[int] | None = None) -> Iterator[Candidate]:
        """Candidates with one decoder layer fewer in a stage of `sources` (None: in any) and one more in another
        that may have it, and those with the MTP layers in another stage."""
        counts, home = candidate
        for source in range(self.num_stages) if sources is None else sources:
            if counts[source] == 0:
                continue
            for target in range(self.num_stages):
                if target != source and not 0 <= home < target:
                    moved = list(counts)
                    moved[source] -= 1
                    moved[target] += 1
                    yield Candidate(tuple(moved), home)
        for other in self.homes:
            if other != home and (moved_home := Candidate(counts, other)).legal:
                yield moved_home


StagePrice = tuple[StageCost, int]
"""Seconds of one microbatch on a stage, and the number of its kind: stages of one kind hold equally much."""

Price = Callable[[int, int, int, bool], StagePrice]
"""`price(stage, first, count, mtp)`: a stage with decoder layers first .. first + count - 1, with or without MTP."""

PeakBytes = Callable[[int, tuple[int, ...], int], int]
"""`peak_bytes(pp_rank, kinds of its stages, first stage that also sends MTP's hidden states)`: bytes on its device at
the fullest moment."""


class Score(NamedTuple):
    """The rating of a candidate; less is better."""

    excess: int
    """Bytes by which the fullest pp_rank's peak exceeds the memory limit."""
    slowest_rank: float
    slowest_stage: float
    spread: float


class Scores:
    """Scores candidates for one schedule; `limit` is how many bytes a device has, None without a limit."""

    def __init__(self, schedule: Schedule, price: Price, peak_bytes: PeakBytes, limit: int | None) -> None:
        place = schedule.placement
        self._ranks = [place.stages_of(pp_rank) for pp_rank in range(place.pp)]
        self._price, self._peak_bytes, self._senders = cache(price), cache(peak_bytes), cache(self._first_senders)
        self._limit = limit

    def seconds(self, stage: int, first: int = 0, count: int = 0, mtp: bool = False) -> float:
        """Seconds of a forward and a backward of one stage."""
        return self._price(stage, first, count, mtp)[0].seconds

    def stage_prices(self, candidate: Candidate) -> list[StagePrice]:
        """The prices of all stages."""
        firsts = accumulate(candidate.counts, initial=0)
        return [
            self._price(stage, first, count, stage == candidate.mtp_stage)
            for stage, (first, count) in enumerate(zip(firsts, candidate.counts, strict=False))
        ]

    def rank_seconds(self, times: Sequence[float]) -> list[float]:
        """Seconds of each pp_rank for a microbatch, from the times of its stages."""
        return [sum(map(times.__getitem__, stages)) for stages in self._ranks]

    def peaks(self, candidate: Candidate, prices: Sequence[StagePrice]) -> list[int]:
        """Bytes on the device of each pp_rank at its fullest moment."""
        kinds = [kind for _, kind in prices]
        owned = (tuple(map(kinds.__getitem__, stages)) for stages in self._ranks)
        return list(map(self._peak_bytes, range(len(self._ranks)), owned, self._senders(candidate.mtp_stage)))

    def _first_senders(self, mtp_stage: int) -> list[int]:
        """By pp_rank the first sender of MTP's hidden states among its stages and those before them."""
        near = [[each for stage in own for each in (stage - 1, stage)] for own in self._ranks]
        none = sum(map(len, self._ranks))
        return [min((each for each in own if each >= mtp_stage), default=none) for own in near]

    def excess(self, peak: int) -> int:
        """Bytes of a peak beyond the limit."""
        return 0 if self._limit is None else max(0, peak - self._limit)

    def score(self, candidate: Candidate) -> Score:
        """The candidate's score."""
        prices = self.stage_prices(candidate)
        times = [cost.seconds for cost, _ in prices]
        excess = self.excess(max(self.peaks(candidate, prices))) if self._limit is not None else 0
        return Score(excess, max(self.rank_seconds(times)), max(times), sum(map(mul, times, times)))

    def promise(self, candidate: Candidate) -> tuple[Score, Candidate]:
        """The key by which candidates are sorted."""
        return self.score(candidate), candidate

    def burdened(self, candidate: Candidate) -> list[int]:
        """Stages to take layers from: the stages of the slowest rank and of the fullest device, and the slowest
        stage."""
        prices = self.stage_prices(candidate)
        times = [cost.seconds for cost, _ in prices]
        slowest = max(self._ranks, key=lambda own: sum(map(times.__getitem__, own)))
        stages = {*slowest, max(range(len(times)), key=times.__getitem__)}
        if self._limit is not None:
            peaks = self.peaks(candidate, prices)
            stages.update(self._ranks[peaks.index(max(peaks))])
        return sorted(stages)
