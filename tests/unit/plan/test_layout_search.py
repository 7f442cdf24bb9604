"""The search for a layout: as good as trying every layout, where that can be done; deterministic; within memory."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations_with_replacement

import pytest

from ppctl.plan.auto_layout import LayoutSearch, SearchResult
from ppctl.plan.layout_scores import Candidate, Price, StagePrice
from ppctl.plan.types import StageCost, StageSpec
from ppctl.schedule.action import Channel, Op, Schedule
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import step_time


def every_layout(num_layers: int, schedule: Schedule, *, has_mtp: bool) -> Iterator[Candidate]:
    stages, pp = schedule.placement.num_stages, schedule.placement.pp
    for cuts in combinations_with_replacement(range(num_layers + 1), stages - 1):
        counts = tuple(b - a for a, b in zip((0, *cuts), (*cuts, num_layers), strict=True))
        for home in range(stages - pp, stages) if has_mtp else (-1,):
            if home < 0 or not any(counts[home + 1 :]):
                yield Candidate(counts, home)


def prices_of(candidate: Candidate, price: Price) -> list[StagePrice]:
    first, prices = 0, []
    for stage, count in enumerate(candidate.counts):
        prices.append(price(stage, first, count, stage == candidate.mtp_stage))
        first += count
    return prices


def seconds_of(candidate: Candidate, schedule: Schedule, price: Price) -> float:
    costs, rank_of = [cost for cost, _ in prices_of(candidate, price)], schedule.placement.rank_of
    hops = [(rank_of(stage), rank_of(stage + 1), each.message_s) for stage, each in enumerate(costs[:-1])]
    longest = {(a, b): max(m for *ends, m in hops if ends == [a, b]) for a, b, _ in hops}
    messages = {Channel(a, b, "F"): m for (a, b), m in longest.items()}
    messages |= {Channel(b, a, "B"): m for (a, b), m in longest.items()}
    return step_time(
        simulate(schedule, Costs([c.forward_s for c in costs], [c.backward_s for c in costs], messages=messages))
    )


def held_by(pp_rank: int, kinds: tuple[int, ...], schedule: Schedule) -> int:
    """By walking the rank's list: what its device holds at its worst moment. A stage's kind is its state in bytes, of
    which it keeps a tenth of each microbatch."""
    state = dict(zip(schedule.placement.stages_of(pp_rank), kinds, strict=True))
    worst = held = sum(kinds)
    for op, stage, _ in schedule.actions[pp_rank]:
        held += state[stage] // 10 * ((op is Op.F) - (op is Op.B))
        worst = max(worst, held)
    return worst


def peak_of(candidate: Candidate, schedule: Schedule, price: Price) -> int:
    states, place = [state for _, state in prices_of(candidate, price)], schedule.placement
    owned = (tuple(map(states.__getitem__, place.stages_of(pp_rank))) for pp_rank in range(place.pp))
    return max(held_by(pp_rank, kinds, schedule) for pp_rank, kinds in enumerate(owned))


def search_layout(
    num_layers: int, has_mtp: bool, schedule: Schedule, price: Price, limit: int | None = None
) -> SearchResult:
    place = schedule.placement
    places = [(stage, place.rank_of(stage), place.chunk_of(stage)) for stage in range(place.num_stages)]
    stages = [
        StageSpec(*each, layers=(), receives=(), sends=(), params=0, replicated_params=0, flops_forward=0)
        for each in places
    ]

    def peak_bytes(pp_rank: int, kinds: tuple[int, ...], _: int) -> int:
        return held_by(pp_rank, kinds, schedule)

    return LayoutSearch(num_layers, has_mtp, schedule, stages, price, peak_bytes, limit).run()


def random_case(seed: int) -> tuple[int, bool, Schedule, Price]:
    draw = random.Random(seed)
    pp = draw.choice([1, 2, 3])
    vpp = draw.choice([1, 2])
    num_layers, has_mtp, m = draw.randint(2, 7), draw.random() < 0.5, draw.choice([1, 2, 4]) * pp
    layers = [draw.uniform(0.8, 1.2) if draw.random() < 0.3 else 1.0 for _ in range(num_layers)]
    message = draw.choice([0.0, 0.05])
    e, loss, mtp = draw.uniform(0, 0.5), draw.uniform(0.2, 3), draw.uniform(0.8, 1.5)

    def price(stage: int, first: int, count: int, has_m: bool) -> StagePrice:
        embedding, has_loss = stage == 0, stage == pp * vpp - 1
        work = sum(layers[first : first + count]) + e * embedding + loss * has_loss + mtp * has_m
        state = 100 * (count + has_m) + 80 * (embedding + has_loss)
        sent = message * (1 + (first + count) / 4)
        return StageCost(work, 0.9 * work, 1.1 * work, sent, 0, 0), state

    name = "interleaved_1f1b" if vpp > 1 else "1f1b"
    schedule = make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m)
    return num_layers, has_mtp, schedule, price


@pytest.mark.parametrize("seed", range(40))
def test_nothing_among_all_layouts_is_faster(seed: int) -> None:
    num_layers, has_mtp, schedule, price = random_case(seed)
    found = search_layout(num_layers, has_mtp, schedule, price)
    fastest = min(seconds_of(c, schedule, price) for c in every_layout(num_layers, schedule, has_mtp=has_mtp))
    assert found.best.step_time == pytest.approx(seconds_of(found.best.candidate, schedule, price))
    assert found.best.step_time <= fastest * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(20))
def test_under_a_memory_limit_it_takes_the_fastest_that_fits(seed: int) -> None:
    num_layers, has_mtp, schedule, price = random_case(seed)
    layouts = list(every_layout(num_layers, schedule, has_mtp=has_mtp))
    peaks = sorted(peak_of(layout, schedule, price) for layout in layouts)
    limit = peaks[len(peaks) // 3]
    found = search_layout(num_layers, has_mtp, schedule, price, limit=limit)
    assert found.best.peak == peak_of(found.best.candidate, schedule, price) <= limit
    fastest = min(seconds_of(c, schedule, price) for c in layouts if peak_of(c, schedule, price) <= limit)
    assert found.best.step_time <= fastest * (1 + 1e-9)


def test_where_nothing_fits_it_is_the_one_that_exceeds_least() -> None:
    num_layers, has_mtp, schedule, price = random_case(3)
    found = search_layout(num_layers, has_mtp, schedule, price, limit=1)
    least = min(peak_of(c, schedule, price) for c in every_layout(num_layers, schedule, has_mtp=has_mtp))
    assert found.best.peak <= 1.05 * least


def test_it_is_the_same_every_time() -> None:
    case = random_case(7)
    assert search_layout(*case) == search_layout(*case)
