"""`layout=auto`: the layout that makes the simulated step shortest within the device's memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace

from ppctl.geometry.layers import Layer, alike
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.layout.letters import canonical_text
from ppctl.layout.rules import even_counts, stages_of
from ppctl.plan.layout_choice import LayoutCut
from ppctl.plan.layout_scores import Candidate, PeakBytes, Price, Scores, Space, StagePrice
from ppctl.plan.memory import rank_pricer
from ppctl.plan.memory_limit import device_limit
from ppctl.plan.prices import pricer, simulation_costs
from ppctl.plan.profile import Profile
from ppctl.plan.sizes import BatchSplit
from ppctl.plan.stages import stage_specs
from ppctl.plan.types import Derived, StageSpec
from ppctl.plan.violations import ConfigValues
from ppctl.schedule.action import Action, Schedule
from ppctl.schedule.executor import execute
from ppctl.topology import ParallelSizes


def balanced_cut(
    values: ConfigValues,
    cut: LayoutCut,
    batch: BatchSplit,
    schedule: Schedule,
    sizes: ParallelSizes,
    measured: Profile | None = None,
) -> LayoutCut:
    """`cut` with the best layout of as many stages, and the equation that compares this layout with others."""
    config, model = values.config, values.config.model
    mtp, known = model.mtp_num_layers or 0, dict[Hashable, StagePrice]()
    of_kind: list[tuple[Layer, ...]] = []
    last = len(cut.layout.stages) - 1
    priced = pricer(config, sizes, batch.micro_batch_size, measured)
    even = stage_specs(config, cut.layout, batch.micro_batch_size, schedule.placement.kind)

    def price(stage: int, first: int, count: int, has_mtp: bool) -> StagePrice:
        layers = (
            *([Layer("embedding")] if stage == 0 else []),
            *(Layer("decoder", index) for index in range(first, first + count)),
            *(Layer("mtp", index) for index in range(mtp if has_mtp else 0)),
            *([Layer("loss")] if stage == last else []),
        )
        if (key := alike(model, config.train, stage, layers)) not in known:
            # Gradients are summed once a step: a layout is judged by its microbatches alone.
            known[key] = priced(stage, layers, False)._replace(reduce_s=0.0), len(of_kind)
            of_kind.append(layers)
        return known[key]

    def peak_bytes(pp_rank: int, kinds: tuple[int, ...], first: int) -> int:
        own = dict(zip(schedule.placement.stages_of(pp_rank), kinds, strict=True))
        stages = []
        for stage, each in enumerate(even):
            received, sent = (1 + mtp * (edge >= first) for edge in (stage - 1, stage))
            layers = of_kind[own[stage]] if stage in own else ()
            stages.append(replace(each, layers=layers, receives=each.receives * received, sends=each.sends * sent))
        (cost,) = rank_pricer(config, stages, sizes, batch.micro_batch_size)(schedule, only=pp_rank)
        return cost.peak_bytes

    device = device_limit(config, sizes)
    limit = None if device is None else device.available_bytes
    result = LayoutSearch(model.num_layers, mtp > 0, schedule, even, price, peak_bytes, limit).run()
    layout = PipelineParallelLayerLayout(_text(result.best.candidate, mtp), values["pp"])
    derived = Derived("layout", layout.canonical(), _equation(result, mtp, batch))
    return replace(cut, layout=layout, derived=(derived, *(each for each in cut.derived if each.key != "layout")))


def _text(candidate: Candidate, mtp: int) -> str:
    return canonical_text(stages_of(candidate.counts, mtp, candidate.mtp_stage))


def _equation(result: SearchResult, mtp: int, batch: BatchSplit) -> str:
    def timed(other: Simulated) -> str:
        return f"{_text(other.candidate, mtp)} {other.step_time * batch.accumulation:.4g} s"

    beside = [f"even split {timed(result.even)}"]
    if result.runner_up is not None:
        beside.insert(0, f"next best {timed(result.runner_up)}")
    count = f"{result.simulated} layouts simulated" if result.simulated > 1 else "the only one"
    return f"layout {timed(result.best)} a step: {count}; {'; '.join(beside)}"


ALLOWANCE = 2_000_000
"""Actions that one search may simulate, which takes two to three seconds. With long steps the finalists may have as
many actions again; scoring all neighbours of a layout with 128 stages takes a further second."""

NEIGHBOURS = 24
"""How many neighbours of the best layout are simulated before it counts as a minimum."""

_PATIENCE = 4
"""How many layouts, the best first, may have no better neighbour before the search ends."""

_FINALISTS = 6
"""How many of the best layouts are simulated with all microbatches in the end."""

_SETTLED = 2
"""Rounds of the pipeline after which every further microbatch takes as long as the slowest rank."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A candidate with its simulated seconds and bytes."""

    candidate: Candidate
    step_time: float
    """Seconds of the step."""
    peak: int
    """Bytes on the device of the fullest pp_rank."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The best layout, the next best, the even split, and the number of simulated layouts."""

    best: Simulated
    runner_up: Simulated | None
    even: Simulated
    simulated: int


class LayoutSearch:
    """The search for a layout. It uses only the places of `stages`; `schedule` may be lowered. If no layout fits into
    the `limit` bytes of a device, the best is the one that exceeds them least."""

    def __init__(
        self,
        num_layers: int,
        has_mtp: bool,
        schedule: Schedule,
        stages: Sequence[StageSpec],
        price: Price,
        peak_bytes: PeakBytes,
        limit: int | None = None,
    ) -> None:
        count, pp = len(stages), schedule.placement.pp
        self.space = Space(num_layers, count, range(count - pp, count) if has_mtp else range(-1, 0))
        self.stages = stages
        self.scores = Scores(schedule, price, peak_bytes, limit)
        self.schedule = schedule
        self.short, self.left_out = _shortened(schedule)
        self.weight = sum(map(len, self.short.actions))
        self.results: dict[Candidate, Simulated] = {}

    def run(self) -> SearchResult:
        """Simulate what descents from the starts reach, and plain candidates; then the best candidates' neighbours,
        until `_PATIENCE` rounds in a row find nothing better or the allowance is spent; then the finalists in full."""
        promise = self.scores.promise
        even = self.simulated(self.space.even())
        starts = {self.descended(start) for start in _starts(self.space, self.scores)}
        for candidate in (*sorted(starts, key=promise), *sorted(self.space.plain(), key=promise)):
            if self.spent < ALLOWANCE // 2:
                self.simulated(candidate)
        tried: set[Candidate] = set()
        fruitless = 0
        while fruitless < _PATIENCE and self.spent < ALLOWANCE:
            before = self.best()
            open_ = [each for each in self.results.values() if each.candidate not in tried]
            if not open_:
                break
            around = min(open_, key=self.order).candidate
            tried.add(around)
            for candidate in self.neighbours(around):
                if self.spent < ALLOWANCE:
                    self.simulated(candidate)
            fruitless = 0 if self.best() != before else fruitless + 1
        ranked = sorted(self.results.values(), key=self.order)
        # If steps are very long, only two are simulated in full.
        finalists = max(2, min(_FINALISTS, ALLOWANCE // 2 // sum(map(len, self.schedule.actions))))
        final = sorted(map(self.in_full, ranked[:finalists]), key=self.order)
        return SearchResult(final[0], final[1] if len(final) > 1 else None, self.in_full(even), len(ranked))

    @property
    def spent(self) -> int:
        """Actions simulated so far."""
        return self.weight * len(self.results)

    def order(self, simulated: Simulated) -> tuple[int, float, int, Candidate]:
        """The key by which results are sorted: least excess of memory, then least time, then least memory."""
        return (self.scores.excess(simulated.peak), simulated.step_time, simulated.peak, simulated.candidate)

    def best(self) -> Simulated:
        """The best simulated candidate."""
        return min(self.results.values(), key=self.order)

    def descended(self, candidate: Candidate) -> Candidate:
        """The local minimum of the score that is reached by moving layers from the slowest rank or stage or the fullest
        device."""
        score = self.scores.score(candidate)
        while True:
            moves = self.space.moves(candidate, self.scores.burdened(candidate))
            best = min(moves, key=self.scores.promise, default=candidate)
            if (better := self.scores.score(best)) >= score:
                return candidate
            candidate, score = best, better

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """The most promising new neighbours by score, and by evenness of stages, which counts more in short steps."""
        fresh = [self.scores.promise(move) for move in self.space.moves(candidate) if move not in self.results]
        by_score = sorted(fresh)[: NEIGHBOURS // 2]
        by_spread = sorted(fresh, key=lambda scored: (scored[0].excess, scored[0].spread, scored[1]))[: NEIGHBOURS // 2]
        return [move for _, move in dict.fromkeys((*by_score, *by_spread))]

    def simulated(self, candidate: Candidate) -> Simulated:
        """The candidate with its simulated step; microbatches that were left out count at the slowest rank's pace."""
        if candidate not in self.results:
            prices = self.scores.stage_prices(candidate)
            pace = max(self.scores.rank_seconds([cost.seconds for cost, _ in prices]))
            seconds = self.step_time(self.short, prices) + self.left_out * pace
            self.results[candidate] = Simulated(candidate, seconds, max(self.scores.peaks(candidate, prices)))
        return self.results[candidate]

    def in_full(self, simulated: Simulated) -> Simulated:
        """The candidate with its step simulated with all microbatches."""
        if not self.left_out:
            return simulated
        prices = self.scores.stage_prices(simulated.candidate)
        return replace(simulated, step_time=self.step_time(self.schedule, prices))

    def step_time(self, schedule: Schedule, prices: Sequence[StagePrice]) -> float:
        """Seconds of one step at these prices. The schedule is executed with its messages, but no trace is made."""
        costs = simulation_costs([cost for cost, _ in prices], self.stages)
        return max(ends[-1] for ends in execute(schedule, costs.seconds(), costs.messages.__getitem__).ends if ends)


def _starts(space: Space, scores: Scores) -> Iterator[Candidate]:
    """For each possible stage of the MTP layers a candidate with filled stages; for the last two also even shares."""
    last = space.num_stages - 1
    for home in space.homes:
        counted: list[Sequence[int]] = [_filled(space, scores, home)]
        if home in (-1, last - 1, last):
            counted.append(even_counts(space.num_layers, space.num_stages))
        for counts in counted:
            candidate = Candidate(tuple(counts), home)
            yield candidate if candidate.legal else candidate.pushed_before()


def _filled(space: Space, scores: Scores, home: int) -> list[int]:
    """Layers per stage if stages are filled in turn, each up to the least time with which they hold all layers."""
    low, high = 0.0, sum(scores.seconds(1, i, 1) for i in range(space.num_layers))
    high += scores.seconds(space.num_stages - 1)
    for _ in range(40):
        middle = (low + high) / 2
        enough = sum(_filled_to(middle, space, scores, home)) == space.num_layers
        low, high = (low, middle) if enough else (middle, high)
    counts = _filled_to(high, space, scores, home)
    counts[0] += space.num_layers - sum(counts)
    return counts


def _filled_to(bound: float, space: Space, scores: Scores, home: int) -> list[int]:
    """Layers per stage if each stage takes as many as fit into `bound` seconds; the sum may be less than all layers."""
    first, counts = 0, []
    for stage in range(space.num_stages):
        count = 0
        # No decoder layer may come after the MTP layers.
        while first + count < space.num_layers and not 0 <= home < stage:
            if scores.seconds(stage, first, count + 1, stage == home) > bound:
                break
            count += 1
        counts.append(count)
        first += count
    return counts


def _shortened(schedule: Schedule) -> tuple[Schedule, int]:
    """(the schedule with just enough microbatches to settle, how many were left out). The middle of a step repeats
    itself: whole rounds of the pipeline between its ends are left out."""
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

    rows = tuple(map(renumbered, schedule.actions))
    return replace(schedule, num_microbatches=kept, actions=rows, pairs=frozenset()), rounds * pp
