"""Rows priced again with other prices, and planned again with what a search leaves out."""

from __future__ import annotations

import pytest

from ppctl.plan import memory
from ppctl.plan.build import plan_alone
from ppctl.plan.memory import device_of
from ppctl.search.answer import PRICES, Row, moved, rows, shares, step_seconds
from ppctl.search.branch import Planned, Search
from ppctl.search.refine import refined
from ppctl.search.space import Configuration, Space
from tests.helpers.small_spaces import all_plans, space


def searched(drawn: Space) -> Search:
    search = Search(drawn)
    for _ in search.run():
        pass
    for _ in search.other_divisions(1.0):
        pass
    return search


def planned_again(drawn: Space, of: Configuration, slower: tuple[str, ...]) -> float:
    values = drawn.values_of(of)
    device = device_of(values.config)
    rates = {rate: getattr(device, rate) / 1.1 for name in slower for rate in PRICES[name]}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "preset", lambda name: device._replace(**rates))
        plan = plan_alone(values)
    assert plan is not None
    return plan.step_time_s


@pytest.mark.parametrize("seed", [1, 4, 5, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(20, 50))])
def test_rows_priced_again_are_plans_under_those_prices(seed: int) -> None:
    search = searched(space(seed))
    listed = rows(search)
    for slower, first in moved(search, listed).items():
        seconds = [planned_again(search.space, row.planned.configuration, slower) for row in listed]
        assert seconds[first] == min(seconds)
        for row, expected in zip(listed, seconds, strict=True):
            assert step_seconds(search.space, row.planned, slower) == pytest.approx(expected, rel=1e-12)
            assert expected >= row.planned.plan.step_time_s


def test_refined_rows_fit_and_are_faster_than_the_first_with_less_recomputation() -> None:
    """A row that computes all again, where it fits without on most ranks."""
    seen = set()
    for seed in range(40):
        drawn = space(seed)
        if "train.recompute_granularity" in drawn.fixed:
            continue
        for of, plan in all_plans(drawn).items():
            planned = Planned(of, plan, 0.0)
            if of.recomputation != "full" or of.pp == 1 or not planned.fits:
                continue
            best = [*refined(drawn, [Row(planned, shares(drawn, planned), ())])][-1]
            if best is not None:
                assert best.planned.fits and best.planned.plan.step_time_s < plan.step_time_s
                again = plan_alone(drawn.values_of(best.planned.configuration).overridden(best.words))
                assert again == best.planned.plan
                seen |= {*best.words}
            break
        if {"train.recompute_stages", "parallel.cpu_offloading"} <= seen:
            return
    assert {"train.recompute_stages", "parallel.cpu_offloading"} <= seen
