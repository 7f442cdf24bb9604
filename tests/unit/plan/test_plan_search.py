"""pipeline.pp_schedule=auto in a plan: within memory, never slower than a named schedule, kept by a resumed run."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from unit_plan import config_values, equation, plan, refusal

from ppctl.config.mapping import converted_value
from ppctl.config.metadata import ACTIVATIONS
from ppctl.errors import ConfigError, Problem
from ppctl.plan import Plan
from ppctl.plan.build import plan_checked
from ppctl.schedule.action import COMPUTE
from ppctl.schedule.policies import POLICIES
from ppctl.schedule.verify import verify

UNEVEN = dict(pp=4, gbs=12, layout="Ettt|t|tt|ttL", model__num_layers=8)


@cache
def searched(**values: Any) -> Plan:
    return plan(**values, pipeline__pp_schedule="auto")


def problems_of(**values: Any) -> tuple[Problem, ...]:
    """What is wrong, whether or not that leaves a plan."""
    try:
        return plan(**values).problems
    except ConfigError as error:
        return tuple(error.problems)


def unit(made: Plan) -> int:
    """What 1F1B keeps on its first rank."""
    first = made.timing.stages[: made.sizes.vpp]
    return min(made.sizes.pp, made.num_microbatches) * sum(stage.activation_bytes for stage in first)


def held(made: Plan) -> int:
    """The most activations that a rank keeps, each from its F to its W."""
    most = 0
    for row in made.schedule.actions:
        now = 0
        for op, stage, _ in row:
            now += made.timing.stages[stage].activation_bytes * ((op == "F") - (op in ("B", "W")))
            most = max(most, now)
    return most


@pytest.mark.parametrize("memory", [0.6, 1.0, 2.0])
def test_it_is_sound_within_memory_and_as_fast_as_any_named_schedule_that_fits(memory: float) -> None:
    made = searched(**UNEVEN, pipeline__schedule_memory=memory)
    assert verify(made.schedule) == [] and not made.problems
    assert held(made) <= memory * unit(made)
    for name in ("1f1b", "gpipe", "zb_h1"):
        named = plan(**UNEVEN, pipeline__pp_schedule=name)
        if held(named) <= memory * unit(made):
            assert made.timing.pipeline_s <= named.timing.pipeline_s * (1 + 1e-9), name
    assert f"pipeline.schedule_memory={memory} ({memory * unit(made) / 2**30:.3g} GiB)" in equation(made, "schedule")


@pytest.mark.shows("pipeline.schedule_memory")
def test_more_memory_makes_an_uneven_pipeline_faster() -> None:
    times = [searched(**UNEVEN, pipeline__schedule_memory=memory).timing.pipeline_s for memory in (0.4, 0.6, 1.0)]
    assert times[0] > times[1] > times[2]


def test_the_devices_memory_decides_where_it_is_known() -> None:
    made = searched(**UNEVEN, launch__device_memory="140MiB", launch__memory_reserve="0MiB")
    assert not made.problems and max(cost.peak_bytes for cost in made.pp_ranks) <= 140 * 2**20
    wide = searched(**UNEVEN, launch__device_memory="80GiB")
    assert max(cost.peak_bytes for cost in wide.pp_ranks) > 140 * 2**20
    assert wide.timing.pipeline_s < made.timing.pipeline_s
    assert "within launch.device_memory;" in equation(wide, "schedule")


@pytest.mark.parametrize("limit", ["130MiB", "150MiB"])
def test_what_waits_for_w_counts_where_layers_are_computed_again(limit: str) -> None:
    """An activation is small from F to I there, and large from I to W; 1F1B, which puts nothing off, fits."""
    sizes = dict(
        **UNEVEN, train__recompute_granularity="full", launch__device_memory=limit, launch__memory_reserve="0MiB"
    )
    made, named = searched(**sizes), plan(**sizes, pipeline__pp_schedule="1f1b")
    assert not named.problems and not made.problems
    assert made.timing.pipeline_s <= named.timing.pipeline_s * (1 + 1e-9)


@pytest.mark.shows("pipeline.put_off_limit")
def test_fewer_weight_gradients_that_wait_take_less_memory_and_hardly_more_time() -> None:
    sizes = dict(pp=4, vpp=2, gbs=16, model__num_layers=8, train__recompute_granularity="full")
    plans = [plan(**sizes, pipeline__pp_schedule="dualpipev", pipeline__put_off_limit=limit) for limit in (None, 2, 0)]
    peaks = [max(cost.peak_bytes for cost in each.pp_ranks) for each in plans]
    assert peaks[0] > peaks[1] > peaks[2]
    assert plans[1].timing.pipeline_s <= 1.02 * plans[0].timing.pipeline_s
    assert not any(each.problems for each in plans)


def test_a_limit_for_weights_is_refused_where_none_waits() -> None:
    for schedule in ("1f1b", "auto"):
        (problem,) = problems_of(**UNEVEN, pipeline__pp_schedule=schedule, pipeline__put_off_limit=2)
        assert (problem.code, problem.remedy) == ("PP-E103", "pipeline.put_off_limit=null")


def test_without_any_limit_it_holds_what_1f1b_does() -> None:
    assert searched(**UNEVEN).schedule == searched(**UNEVEN, pipeline__schedule_memory=1.0).schedule


def test_two_chunks_are_placed_as_a_loop_or_as_a_v() -> None:
    made = searched(pp=4, vpp=2, gbs=16, model__num_layers=8, pipeline__schedule_memory=1.5)
    kind = made.schedule.placement.kind
    assert {stage.stage: stage.pp_rank for stage in made.stages} == {
        stage: made.schedule.placement.rank_of(stage) for stage in range(8)
    }
    assert f"placed as a {'V' if kind == 'v' else kind}:" in equation(made, "schedule")
    for name in ("zbv_zero_bubble", "interleaved_1f1b", "interleaved_zero_bubble"):
        named = plan(pp=4, vpp=2, gbs=16, model__num_layers=8, pipeline__pp_schedule=name)
        if held(named) <= 1.5 * unit(made):
            assert made.timing.pipeline_s <= named.timing.pipeline_s * (1 + 1e-9), name


def test_in_batches_it_is_timed_in_batches() -> None:
    batched = dict(parallel__batch_p2p_comm=True, parallel__overlap_p2p_comm=False)
    made = searched(**UNEVEN, **batched, pipeline__schedule_memory=2.0)
    assert made.schedule.batched
    for name in ("1f1b", "zb_h1"):
        named = plan(**UNEVEN, **batched, pipeline__pp_schedule=name)
        assert made.timing.pipeline_s <= named.timing.pipeline_s * (1 + 1e-9), name


def test_with_an_open_layout_both_are_searched() -> None:
    sizes = dict(pp=3, gbs=6, layout="auto", model__num_layers=7, pipeline__schedule_memory=4.0)
    made = searched(**sizes)
    rival = next(each for each in made.derived if each.key == "named schedule")
    assert rival.value in POLICIES and "on its best layout" in rival.equation
    for name in ("1f1b", "gpipe", "zb_h1"):
        values = {key: value for key, value in sizes.items() if key != "pipeline__schedule_memory"}
        assert made.timing.pipeline_s <= plan(**values, pipeline__pp_schedule=name).timing.pipeline_s * (1 + 1e-9)


def test_a_limit_below_any_schedule_is_refused_with_the_least_that_works() -> None:
    values = dict(**UNEVEN, pipeline__pp_schedule="auto")
    (problem,) = problems_of(**values, pipeline__schedule_memory=0.1)
    assert problem.code == "PP-E321" and "pipeline.schedule_memory=null" in problem.remedy
    least = float(problem.remedy.splitlines()[0].partition("=")[2])
    assert not plan(**values, pipeline__schedule_memory=least).problems
    assert refusal(**values, pipeline__schedule_memory=least - 0.02) == ["PP-E321"]


def test_a_limit_with_a_unit_means_the_bytes_that_a_number_counts_in_units_of_1f1b() -> None:
    by_number = searched(**UNEVEN, pipeline__schedule_memory=0.5)
    size = unit(by_number) // 2
    by_size = searched(**UNEVEN, pipeline__schedule_memory=f"{size}B")
    assert by_size.schedule == by_number.schedule and held(by_size) <= size
    assert f"pipeline.schedule_memory={size}B (0.5 of what 1F1B keeps)" in equation(by_size, "schedule")
    (problem,) = problems_of(**UNEVEN, pipeline__pp_schedule="auto", pipeline__schedule_memory="1MiB")
    assert problem.code == "PP-E321"
    enough = problem.remedy.splitlines()[0].partition("=")[2]
    assert enough.endswith("GiB") and not searched(**UNEVEN, pipeline__schedule_memory=enough).problems


@pytest.mark.parametrize("limit", ["0GiB", "-1", "nan", "much", "0"])
def test_what_is_no_amount_of_memory_is_refused_with_one_that_is(limit: str) -> None:
    assert not ACTIVATIONS.allows(converted_value("pipeline.schedule_memory", limit))


@pytest.mark.parametrize("sharding", ["none", "optimizer_gradients", "full"])
def test_a_device_too_small_for_any_schedule_is_refused_with_the_least_that_works(sharding: str) -> None:
    sizes = dict(**UNEVEN, dp=2, parallel__data_parallel_sharding=sharding, launch__memory_reserve="0MiB")
    made = searched(**sizes, launch__device_memory="40MiB")
    (problem,) = made.problems
    assert problem.code == "PP-E801" and "one microbatch after another" in problem.message
    assert "launch.device_memory=1GiB" in problem.remedy.splitlines()
    least = max(cost.peak_bytes for cost in made.pp_ranks)
    # Slow at the least, and with what another microbatch takes faster at once.
    alone, more = (searched(**sizes, launch__device_memory=f"{least + part}B") for part in (0, least // 4))
    for each in (alone, more):
        assert not each.problems and max(cost.peak_bytes for cost in each.pp_ranks) <= each.limit.available_bytes
    assert more.timing.pipeline_s < 0.8 * alone.timing.pipeline_s
    under = searched(**sizes, launch__device_memory=f"{least - 1}B")
    assert [each.code for each in under.problems] == ["PP-E801"]


def test_what_cannot_take_effect_is_refused() -> None:
    assert refusal(**UNEVEN, pipeline__pp_schedule="auto", pipeline__extra_warmup=1) == ["PP-E215"]
    assert [each.code for each in problems_of(**UNEVEN, pipeline__schedule_memory=2.0)] == ["PP-E103"]


def test_a_resumed_run_keeps_its_schedule_for_the_same_pipeline() -> None:
    made = config_values(**UNEVEN, pipeline__pp_schedule="auto")
    before = plan(**UNEVEN, pipeline__pp_schedule="gpipe")  # any order that a search would not find
    again = plan_checked(made.config, made.provenance, [], before=before)
    assert again.schedule.actions == before.schedule.actions
    assert "kept from the run's earlier start" in equation(again, "schedule")
    longer = config_values(**{**UNEVEN, "gbs": 16}, pipeline__pp_schedule="auto")
    fresh = plan_checked(longer.config, longer.provenance, [], before=before)
    assert fresh.num_microbatches == 16 and "orders within" in equation(fresh, "schedule")
    assert all(action.op in COMPUTE or action.mb < 16 for row in fresh.schedule.actions for action in row)
