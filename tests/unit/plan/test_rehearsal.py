"""What a rehearsal needs of a plan and what follows from one: kinds, microbatches, other ranks' peaks, the report."""

from dataclasses import asdict, replace

import pytest
from unit_plan import config_values

from ppctl.plan import build_plan
from ppctl.plan.rehearsal import UPDATE, Rehearsal, kinds_of, peaks_of, replayed, scaled, shortened
from ppctl.records.json_reader import read
from ppctl.records.rehearsal_record import (
    BACKWARD,
    FORWARD,
    MESSAGE,
    STEP,
    HostWait,
    LayerKernels,
    MeasuredTraffic,
    Moment,
    Operations,
    Rehearsed,
    StageMemory,
)
from ppctl.schedule.action import Action, B, F, I, W

MIB = 2**20


def made(**values):
    """(config, plan) of the defaults with `values` typed."""
    typed = config_values(**values)
    return typed.config, build_plan(typed.config, dict(typed.provenance))


def members(**values):
    return [kind.pp_ranks for kind in kinds_of(*made(**values))]


def as_sets(kinds):
    return [set(kind) for kind in kinds]


def test_ranks_whose_stages_hold_the_same_layers_are_one_kind():
    found = members(pp=4, layout="Et|tt|tt|tL", model__num_layers=6)
    assert as_sets(found) == [{0}, {1, 2}, {3}]


def test_the_rank_with_the_most_in_flight_is_the_first_of_its_kind():
    config, plan = made(pp=5, layout="Et|tt|tt|tt|tL", model__num_layers=8, gbs=10)
    kind = kinds_of(config, plan)[1]
    assert plan.pp_ranks[1].peak_bytes > plan.pp_ranks[3].peak_bytes
    assert kind.pp_ranks == (1, 2, 3)


def test_uneven_and_empty_stages_are_kinds_of_their_own():
    found = members(pp=6, layout="Et|tt|t||tt|tL", model__num_layers=7, gbs=12)
    assert as_sets(found) == [{0}, {1, 4}, {2}, {3}, {5}]


def test_stages_that_recompute_are_of_another_kind():
    values = dict(pp=4, layout="Et|tt|tt|tL", model__num_layers=6, train__recompute_granularity="full")
    assert as_sets(members(**values)) == [{0}, {1, 2}, {3}]
    assert as_sets(members(**values, train__recompute_stages=[1])) == [{0}, {1}, {2}, {3}]


def test_dense_layers_and_experts_are_different_kinds():
    values = dict(pp=4, layout="Et|tt|tt|tL", model__num_layers=6, model__num_moe_experts=4)
    assert as_sets(members(**values, model__moe_layer_freq=[0, 0, 0, 1, 1, 1])) == [{0}, {1}, {2}, {3}]


def test_a_v_folds_first_and_last_stage_onto_one_rank():
    values = dict(pp=4, vpp=2, pipeline__pp_schedule="zbv_zero_bubble", model__num_layers=8, gbs=16)
    assert as_sets(members(**values)) == [{0}, {1, 2, 3}]
    # A ring has the first layer on its first rank and the last on its last one.
    ring = values | dict(pipeline__pp_schedule="interleaved1f1b")
    assert as_sets(members(**ring)) == [{0}, {1, 2}, {3}]


def test_a_kind_names_every_global_rank_once():
    config, plan = made(pp=4, dp=2, layout="Et|tt|tt|tL", model__num_layers=6, gbs=16)
    kinds = kinds_of(config, plan)
    assert sorted(rank for kind in kinds for rank in kind.ranks) == list(range(8))
    for kind in kinds:
        assert {plan.for_rank(rank).pp_rank for rank in kind.ranks} == set(kind.pp_ranks)
        assert plan.for_rank(kind.ranks[0]).pp_rank == kind.pp_ranks[0]


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved1f1b", "zb_h1", "zbv_zero_bubble"])
def test_fewer_microbatches_fill_every_device_as_much(schedule):
    vpp = 1 if schedule in ("1f1b", "zb_h1") else 2
    config, plan = made(pp=4, vpp=vpp, pipeline__pp_schedule=schedule, gbs=64, model__num_layers=8)
    less, short = shortened(config, plan)
    assert short.num_microbatches < plan.num_microbatches == 64
    assert short.num_microbatches % 4 == 0
    assert [rank.activation_bytes for rank in short.pp_ranks] == [rank.activation_bytes for rank in plan.pp_ranks]
    assert [stage.layers for stage in short.stages] == [stage.layers for stage in plan.stages]
    assert less.train.global_batch_size == short.num_microbatches
    assert config.train.global_batch_size == 64


@pytest.mark.parametrize(
    "split",
    [
        dict(model__num_layers=7, parallel__account_for_embedding_in_pipeline_split=True),
        dict(model__num_layers=10, parallel__num_layers_in_first_pipeline_stage=1),
        dict(model__num_layers=8, pipeline__layers_per_stage=1, pipeline__pp_schedule="interleaved1f1b"),
    ],
)
def test_stages_by_another_systems_option_are_kept_with_fewer_microbatches(split):
    config, plan = made(pp=4, gbs=64, **split)
    _, short = shortened(config, plan)
    assert short.num_microbatches < plan.num_microbatches
    assert short.layout == plan.layout


def test_a_schedule_that_holds_all_microbatches_is_not_shortened():
    config, plan = made(pp=2, vpp=1, pipeline__pp_schedule="gpipe", gbs=64)
    assert shortened(config, plan) == (config, plan)


def test_a_step_of_few_microbatches_is_not_shortened():
    config, plan = made(pp=4, gbs=8)
    assert shortened(config, plan) == (config, plan)


def test_calls_of_a_size_of_their_own_are_not_shortened():
    config, plan = made(pp=2, gbs=64, pipeline__pp_batch_size=32)
    assert shortened(config, plan) == (config, plan)


MEASURED = Rehearsed(
    rank=0,
    weight_bytes=4 * MIB,
    gradient_bytes=4 * MIB,
    optimizer_bytes=8 * MIB,
    peak_bytes=30 * MIB,
    peak_action="0B0",
    stages=(StageMemory(0, 2 * MIB, 3 * MIB, MIB),),
    moments=(Moment(0, 20 * MIB, 21 * MIB), Moment(1, 24 * MIB, 30 * MIB)),
    in_update=17 * MIB,
    host_waits=(HostWait("ppctl/a.py", 3, FORWARD, 8), HostWait("ppctl/b.py", 4, STEP, 2)),
    layers=(LayerKernels("decoder", BACKWARD, 8, 80, 40, 4000, 4),),
    operations=(Operations(BACKWARD, 80, 40), Operations(STEP, 9, 5)),
    traffic=(MeasuredTraffic("send", "pp", MESSAGE, 4, 400), MeasuredTraffic("allreduce", "dp", STEP, 1, 64)),
    seconds=0.12345,
)


def test_what_a_microbatch_does_is_scaled_and_what_a_step_does_is_not():
    found = scaled(MEASURED, 4, 10)
    assert [wait.count for wait in found.host_waits] == [20, 2]
    assert [(part.count, part.launches) for part in found.operations] == [(200, 100), (9, 5)]
    assert [(part.count, part.bytes) for part in found.traffic] == [(10, 1000), (1, 64)]
    assert found.layers == (LayerKernels("decoder", BACKWARD, 20, 200, 100, 10_000, 10),)
    assert (found.peak_bytes, found.stages) == (MEASURED.peak_bytes, MEASURED.stages)
    assert scaled(MEASURED, 4, 4) == MEASURED


def test_a_list_is_replayed_with_what_was_measured_of_its_stages():
    stages = {0: StageMemory(0, 10, 14, 3), 2: StageMemory(2, 20, 5, 8)}
    actions = [Action(F, 0, 0), Action(F, 2, 0), Action(B, 2, 0), Action(B, 0, 0)]
    assert [*replayed(actions, stages)] == [
        (0, 14),
        (1, 30),  # in its forward less than it keeps
        (2, 38),
        (3, 13),
    ]


def test_received_messages_stay_in_their_pool():
    stages = {0: StageMemory(0, 10, 10, 3, received=4)}
    actions = [Action(F, 0, 0), Action(F, 0, 1), Action(B, 0, 0), Action(B, 0, 1)]
    assert [most for _, most in replayed(actions, stages)] == [14, 24, 23, 17]


def test_a_split_backward_frees_with_its_weight_gradients():
    stages = {0: StageMemory(0, 10, 10, 3)}
    assert [*replayed([Action(F, 0, 0), Action(I, 0, 0), Action(W, 0, 0)], stages)] == [(0, 10), (2, 13)]


def rehearsal(measured=MEASURED, **values):
    """The rehearsal of four pp_ranks, the first kind of which was measured as `measured`."""
    config, plan = made(pp=4, vpp=1, layout="Et|t|t|tL", model__num_layers=4, gbs=16, **values)
    _, short = shortened(config, plan)
    kinds = kinds_of(config, plan)
    found = []
    for kind in kinds:
        stage = kind.pp_ranks[0]
        memory = replace(measured.stages[0], stage=stage)
        steps = replayed(short.schedule.actions[stage], {stage: memory})
        top = max(steps, key=lambda step: step[1])[0]
        moments = (Moment(top, 24 * MIB, 30 * MIB),)
        found.append((kind, replace(measured, rank=kind.ranks[0], stages=(memory,), moments=moments)))
    return Rehearsal(config, plan, short, tuple(found))


def test_the_peaks_of_others_follow_from_their_own_lists():
    made_ = rehearsal()
    workspace = made_.plan.pp_ranks[0].buffer_bytes
    peaks = {peak.pp_rank: peak for peak in made_.peaks}
    assert sorted(peaks) == [0, 1, 2, 3]
    # pp_rank 1 was measured: three in flight, the last in its forward, take 7 MiB of 30.
    assert peaks[1].peak_bytes == 30 * MIB + workspace
    assert peaks[1].base == 23 * MIB + workspace
    # pp_rank 2 holds one microbatch less.
    assert peaks[2].peak_bytes == 28 * MIB + workspace
    assert peaks[2].base == peaks[1].base
    assert set(peaks[2].stages) == {2}
    assert peaks[1].peak_action == "1F2"


def test_an_update_that_needs_more_is_the_peak():
    made_ = rehearsal(replace(MEASURED, in_update=99 * MIB))
    assert {peak.peak_action for peak in made_.peaks} == {UPDATE}
    assert made_.peaks[0].peak_bytes == 99 * MIB + made_.plan.pp_ranks[0].buffer_bytes


def test_peaks_of_is_of_one_kind():
    made_ = rehearsal()
    (kind, measured) = made_.measured[1]
    assert [peak.pp_rank for peak in peaks_of(made_.plan, made_.short, kind, measured)] == [1, 2]


def test_the_report_has_the_fields_that_it_promises():
    found = rehearsal(launch__device_memory="80GiB").report()
    assert {"ranks", "limit_bytes", "reserve_bytes", "tight"} <= found.keys()
    assert found.keys() - {"pp_ranks", "microbatches", "microbatches_rehearsed"} == {
        "ranks",
        "limit_bytes",
        "reserve_bytes",
        "tight",
    }
    rank = found["ranks"][1]
    assert (rank["rank"], rank["same_as"], rank["stages"]) == (1, [2], [1])
    state = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "peak_bytes", "kept_bytes_per_microbatch")
    assert tuple(rank["planned"]) == tuple(rank["measured"]) == state
    assert rank["measured"]["kept_bytes_per_microbatch"] == {1: 2 * MIB}
    assert {*rank} == {
        *("rank", "same_as", "stages", "planned", "measured", "peak_action", "host_waits", "operations", "launches"),
        *("layers", "messages", "seconds"),
    }
    assert {*rank["host_waits"][0]} == {"file", "line", "count", "during"}
    assert {*rank["messages"][0]} == {"kind", "group", "count", "bytes", "during"}
    assert [row["pp_rank"] for row in found["pp_ranks"]] == [0, 1, 2, 3]
    assert (found["microbatches"], found["microbatches_rehearsed"]) == (16, 8)
    assert rank["operations"] == 80 * 2 + 9
    assert found["limit_bytes"] == 80 * 2**30
    assert found["reserve_bytes"] > 0


def test_what_was_measured_goes_through_json():
    assert read(Rehearsed, asdict(MEASURED)) == MEASURED


def test_memory_that_does_not_fit_is_a_problem_with_its_action():
    made_ = rehearsal(launch__device_memory="4GiB")
    available = made_.plan.limit.available_bytes
    assert [*made_.problems()] == []
    large = rehearsal(replace(MEASURED, in_update=available), launch__device_memory="4GiB")
    (problem,) = large.problems()
    assert (problem.code, problem.place) == ("PP-E801", "launch.device_memory")
    assert "in update" in problem.message
    assert [*rehearsal(replace(MEASURED, in_update=10**15)).problems()] == []


@pytest.mark.parametrize(("share", "tight"), [(0.94, False), (0.96, True)])
def test_within_five_percent_it_is_tight(share, tight):
    plain = rehearsal(launch__device_memory="8GiB")
    workspace = plain.plan.pp_ranks[0].buffer_bytes
    update = int(share * plain.plan.limit.available_bytes) - workspace
    assert rehearsal(replace(MEASURED, in_update=update), launch__device_memory="8GiB").tight is tight
    assert rehearsal(replace(MEASURED, in_update=update)).tight is False


def test_the_picture_has_what_was_measured_beside_what_was_planned():
    picture = rehearsal().picture()
    assert [memory.fixed for memory in picture.measured] == [peak.base for peak in rehearsal().peaks]
    assert picture.measured[2].per_microbatch == {2: 2 * MIB}
