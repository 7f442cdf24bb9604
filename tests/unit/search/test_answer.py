"""Rows priced again with other prices, and planned again with what a search leaves out."""

from __future__ import annotations

import time
from itertools import count

import pytest

from ppctl.config.compose import compose
from ppctl.host.accelerators import preset
from ppctl.plan import Plan, memory
from ppctl.plan.build import plan_alone
from ppctl.plan.memory import device_of
from ppctl.plan.violations import ConfigValues
from ppctl.search import refine
from ppctl.search.answer import PRICES, AnswerRow, moved, rows, step_seconds
from ppctl.search.branch import Planned, Search
from ppctl.search.refine import Refinement
from ppctl.search.space import Configuration, SearchSpace
from tests.helpers.small_spaces import space


def searched(drawn: SearchSpace) -> Search:
    search = Search(drawn)
    for _ in search.run():
        pass
    for _ in search.other_divisions(1.0):
        pass
    return search


def planned_again(drawn: SearchSpace, of: Configuration, slower: tuple[str, ...]) -> float:
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


PIPELINE = (
    *("model.num_layers=8", "model.hidden_size=4096", "model.num_attention_heads=32", "model.ffn_hidden_size=16384"),
    *("model.vocab_size=8192", "launch.device=cuda", "cost.device=h100", "parallel.bf16=true", "seq=4096", "gbs=16"),
    *("launch.memory_reserve=0GiB", "nodes=1", "gpus_per_node=4", "pp=4", "vpp=1", "pp_schedule=1f1b", "layout=null"),
)


@pytest.mark.parametrize(
    ("host_link", "word"), [(4e10, "train.recompute_stages"), (1e13, "parallel.cpu_offloading_num_layers")]
)
def test_a_row_that_computes_all_again_does_so_where_it_must(
    host_link: float, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the stages alone of ranks with too little memory; with a fast link to the host layers wait there instead."""
    monkeypatch.setattr(memory, "preset", lambda name: preset(name)._replace(host_link=host_link))

    def of_memory(size: int) -> SearchSpace:
        composed = compose([*PIPELINE, f"launch.device_memory={size}MiB"])
        return SearchSpace(ConfigValues(composed.config, composed.provenance))

    of = Configuration(1, 1, 4, 1, 1, 1, "none", 1, "1f1b", "none")
    none = plan_alone(of_memory(10**6).values_of(of))
    assert none is not None
    peaks = [cost.peak_bytes / 2**20 for cost in none.pp_ranks]
    drawn = of_memory(int((max(peaks) + min(peaks)) / 2))
    full = of._replace(recomputation="full")
    plan = plan_alone(drawn.values_of(full))
    assert plan is not None and Planned(full, plan, 0.0).fits
    again = Refinement(drawn, [AnswerRow(Planned(full, plan, 0.0), {}, ())], 100.0)
    assert again.run()
    best = again.best
    assert best is not None and word in best.words
    assert best.planned.fits and best.planned.plan.step_time_s < plan.step_time_s
    plan = plan_alone(drawn.values_of(best.planned.configuration).overridden(best.words))
    assert plan is not None and plan.step_time_s == best.planned.plan.step_time_s


@pytest.mark.parametrize("seconds", [0.0, 0.003, 100.0])
def test_a_refinement_is_the_same_on_a_slow_machine_and_beside_clocks_that_jump(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed = compose([*PIPELINE, "launch.device_memory=40GiB"])
    drawn = SearchSpace(ConfigValues(composed.config, composed.provenance))
    of = Configuration(1, 1, 4, 1, 1, 1, "full", 1, "1f1b", "none")
    plan = plan_alone(drawn.values_of(of))
    assert plan is not None
    listed = [AnswerRow(Planned(of, plan, 0.0), {}, ())] * 3

    def answer() -> tuple[int, bool, tuple[int, dict, float] | None]:
        again = Refinement(drawn, listed, seconds)
        complete, best = again.run(), again.best
        return again.plans, complete, best and (best.row, best.words, best.planned.plan.step_time_s)

    quick, jumps = answer(), count(time.time(), 3600.0)

    def slow(values: ConfigValues) -> Plan | None:
        time.sleep(0.02)
        return plan_alone(values)

    monkeypatch.setattr(refine, "plan_alone", slow)
    for clock in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, clock, lambda: next(jumps))
    assert answer() == quick
    every = 3 * (1 + (3).bit_length())
    assert (quick[0] == 0, 0 < quick[0] < every, quick[1]) == (seconds == 0, seconds == 0.003, seconds == 100)
