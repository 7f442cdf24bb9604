"""What follows from a config: sizes by equations, the layout, stages, costs and a proved schedule."""

from dataclasses import replace

import pytest
from unit_plan import config_values, equation, plan

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.cost.parameter_counts import mtp_parameters, total_parameters
from ppctl.errors import ConfigError, Problem
from ppctl.geometry.layers import parse_layers
from ppctl.layout import PipelineParallelLayerLayout
from ppctl.plan import TensorSpec, build_plan, plan_checked
from ppctl.plan.memory_limit import amount, unit_for
from ppctl.plan.types import RankCost
from ppctl.schedule.simulate import in_flight
from ppctl.schedule.verify import verify


def config_and_sources(**values: object) -> tuple[RunConfig, dict[str, str]]:
    made = config_values(**values)
    return made.config, dict(made.provenance)


@pytest.mark.shows("pipeline.pp_microbatch_size")
@pytest.mark.parametrize(
    ("values", "world", "dp", "microbatches"),
    [
        (dict(), 1, 1, 8),
        (dict(pp=2), 2, 1, 8),
        (dict(pp=2, dp=2), 4, 2, 4),
        (dict(pp=2, nodes=1, gpus_per_node=8), 8, 4, 2),
        (dict(pp=2, nodes=2), 2, 1, 8),
        (dict(pp=4, gpus_per_node=2), 4, 1, 8),
        (dict(pp=2, gpus_per_node=4), 4, 2, 4),
        (dict(pp=2, tp=2, cp=2, nodes=2, gpus_per_node=8, seq=256), 16, 2, 4),
        (dict(pp=2, mbs=4, gbs=24), 2, 1, 6),
        (dict(pp=2, pipeline__pp_microbatch_size=4, gbs=24), 2, 1, 6),
    ],
)
def test_the_world_and_the_batch_follow_from_what_was_given(values, world: int, dp: int, microbatches: int) -> None:
    made = plan(**values)
    assert (made.sizes.world, made.sizes.dp, made.num_microbatches) == (world, dp, microbatches)


def test_every_derived_size_has_its_equation() -> None:
    made = plan(pp=2, vpp=2, nodes=2, gpus_per_node=4, gbs=64, mbs=2, layout="Ett|tt|tt|ttL")
    assert equation(made, "data_parallel_size") == "world 8 = nodes 2 x 4 = tp 1 x cp 1 x pp 2 x dp 4"
    assert equation(made, "num_microbatches") == "global_batch_size 64 = dp 4 x num_microbatches 8 x micro_batch_size 2"
    assert made.derived[0].value == 8


@pytest.mark.parametrize(
    ("values", "calls", "microbatches", "printed"),
    [
        (dict(gbs=16), 1, 16, "global_batch_size 16 = dp 1 x num_microbatches 16 x micro_batch_size 1"),
        (
            dict(gbs=16, dp=2, mbs=2, pipeline__pp_batch_size=4),
            2,
            2,
            "global_batch_size 16 = dp 2 x gradient_accumulation_steps 2 x num_microbatches 2 x micro_batch_size 2",
        ),
        (
            dict(gbs=16, pipeline__pp_batch_size=1),
            16,
            1,
            "global_batch_size 16 = dp 1 x gradient_accumulation_steps 16 x num_microbatches 1 x micro_batch_size 1",
        ),
    ],
)
def test_a_given_pp_batch_size_is_one_schedule_call_of_several(values, calls, microbatches, printed) -> None:
    made = plan(**values)
    assert (made.gradient_accumulation_steps, made.num_microbatches) == (calls, microbatches)
    assert equation(made, "num_microbatches") == printed
    one = plan(**(values | {"gbs": values["gbs"] // calls}))
    assert made.step_time_s == pytest.approx(calls * one.timing.pipeline_s + one.timing.optimizer_s)


def test_overriding_pp_keeps_the_world_and_moves_dp() -> None:
    sizes = [plan(pp=pp, nodes=1, gpus_per_node=8, gbs=16).sizes for pp in (1, 2, 4, 8)]
    assert [(size.world, size.dp) for size in sizes] == [(8, 8), (8, 4), (8, 2), (8, 1)]


def test_experts_have_their_own_view_of_the_same_ranks() -> None:
    made = plan(pp=2, ep=2, model__num_moe_experts=4, nodes=1, gpus_per_node=8)
    assert (made.sizes.ep, made.sizes.etp, made.sizes.edp) == (2, 1, 2)
    assert equation(made, "expert_data_parallel_size") == "tp 1 x cp 1 x dp 4 = etp 1 x ep 2 x edp 2"


@pytest.mark.parametrize(
    ("values", "printed"),
    [
        (
            dict(pp=2, tp=4, nodes=2, gpus_per_node=8, gbs=16),
            "order tp-cp-ep-dp-pp (default) on nodes of 8 ranks: tp, dp within a node; pp across nodes",
        ),
        (
            dict(pp=2, tp=4, nodes=2, gpus_per_node=8, gbs=16, parallel__order="tp-cp-ep-pp-dp"),
            "order tp-cp-ep-pp-dp (command line) on nodes of 8 ranks: tp, pp within a node; dp across nodes",
        ),
        (
            dict(ep=4, model__num_moe_experts=4, nodes=4, gbs=8, gpus_per_node=2),
            "order tp-cp-ep-dp-pp (default) on nodes of 2 ranks: dp, ep, edp across nodes",
        ),
    ],
)
def test_the_plan_says_which_axes_cross_nodes(values, printed) -> None:
    assert equation(plan(**values), "axes_across_nodes") == printed


def test_a_model_without_experts_can_have_any_order() -> None:
    made = plan(pp=2, tp=2, cp=2, parallel__order="tp-cp-ep-pp-dp")
    assert made.problems == ()
    assert made.sizes.pipeline_strides == (4, 2)
    assert [made.for_rank(rank).pp_rank for rank in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize(
    ("values", "layout", "vpp"),
    [
        (dict(), "Et*8L", 1),
        (dict(pp=4), "Ett|tt|tt|ttL", 1),
        (dict(pp=2, vpp=2), "Ett|tt|tt|ttL", 2),
        (dict(pp=3), "Et*3|t*3|ttL", 1),
        (dict(pp=2, layout="Et|tt|tt|tttL"), "Et|tt|tt|tttL", 2),
        (dict(pp=2, layout=[["E"], ["t"] * 5, ["t"] * 3, ["L"]]), "E|t*5|t*3|L", 2),
        (dict(pp=2, vpp=2, layout="E||t*8|L"), "E||t*8|L", 2),
        (dict(pp=1, vpp=2), "Et*4|t*4L", 2),
        (dict(pp=2, model__mtp_num_layers=1), "Et*4|t*4mL", 1),
    ],
)
def test_the_layout_is_the_one_given_or_the_even_split(values, layout: str, vpp: int) -> None:
    made = plan(**values)
    assert made.layout == PipelineParallelLayerLayout(layout, made.sizes.pp).canonical()
    assert made.sizes.vpp == vpp


def test_what_was_chosen_for_the_user_is_said() -> None:
    assert equation(plan(pp=2, layout="Et|tt|tt|tttL"), "vpp") == "vpp 2 = 4 stages of the layout / pp 2"
    assert "even split of 8 layers over 4 stages (pp 2 x vpp 2)" in equation(plan(pp=2, vpp=2), "layout")
    assert "2 stages have no decoder layer" in equation(plan(pp=2, vpp=5), "layout")
    assert "interleaved_1f1b: 2 chunks per rank" in equation(plan(pp=2, vpp=2), "schedule")
    config, provenance = config_and_sources(pp=4)
    provenance["parallel.pipeline_model_parallel_layout"] = "derived: layout X set aside because pp was changed"
    assert equation(build_plan(config, provenance), "layout").endswith("; layout X set aside because pp was changed")


@pytest.mark.parametrize(
    ("values", "schedule"),
    [
        (dict(pp=2), "1f1b"),
        (dict(pp=1), "1f1b"),
        (dict(pp=2, vpp=2), "interleaved_1f1b"),
        (dict(pp=2, layout="Et|tt|tt|tttL"), "interleaved_1f1b"),
        (dict(pp=2, pipeline__pp_schedule="GPipe"), "gpipe"),
        (dict(pp=2, vpp=2, pipeline__pp_schedule="gpipe"), "gpipe"),
        (dict(pp=2, pipeline__pp_schedule="Interleaved1F1B"), "interleaved_1f1b"),
        (dict(pp=2, vpp=2, pipeline__pp_schedule="interleaved_1f1b"), "interleaved_1f1b"),
    ],
)
def test_the_schedule_fits_the_number_of_chunks(values, schedule: str) -> None:
    assert plan(**values).schedule.name == schedule


def test_a_recipes_interleaving_gives_way_to_one_chunk_on_the_command_line() -> None:
    config, provenance = config_and_sources(pp=2, vpp=1, pipeline__pp_schedule="interleaved1f1b")
    provenance["pipeline.pp_schedule"] = "recipe x (recipes/x.yaml:3)"
    made = build_plan(config, provenance)
    assert made.schedule.name == "1f1b"
    assert "recipes/x.yaml:3" in equation(made, "schedule")


@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("gbs", [1, 2, 5, 8])
def test_every_plan_is_proved_and_counts_what_is_in_flight(pp: int, vpp: int, gbs: int) -> None:
    made = plan(pp=pp, vpp=vpp, gbs=gbs)
    assert made.problems == ()
    assert verify(made.schedule) == []
    assert verify(made.forward_schedule) == []
    assert tuple(cost.in_flight for cost in made.pp_ranks) == in_flight(made.schedule)


@pytest.mark.parametrize("pp", [1, 2, 4, 8])
@pytest.mark.parametrize("gbs", [1, 4, 16, 24])
def test_activations_in_flight_are_the_textbooks(pp: int, gbs: int) -> None:
    single, double = plan(pp=pp, gbs=gbs), plan(pp=pp, vpp=2, gbs=gbs, model__num_layers=16)
    assert [cost.in_flight for cost in single.pp_ranks] == [min(pp - rank, gbs) for rank in range(pp)]
    if pp > 1 and gbs % pp == 0:
        expected = [min(2 * (pp - rank - 1) + pp + 1, 2 * gbs) for rank in range(pp)]
        assert [cost.in_flight for cost in double.pp_ranks] == expected


@pytest.mark.shows("parallel.microbatch_group_size_per_vp_stage")
def test_a_group_size_counts_only_when_it_was_given() -> None:
    config, provenance = config_and_sources(pp=2, vpp=2, gbs=8)
    config.parallel.microbatch_group_size_per_vp_stage = 1
    by_default = build_plan(config, provenance).schedule
    assert by_default == plan(pp=2, vpp=2, gbs=8).schedule
    provenance["parallel.microbatch_group_size_per_vp_stage"] = "recipe x"
    config.parallel.microbatch_group_size_per_vp_stage = 4
    assert build_plan(config, provenance).schedule != by_default


def test_stages_say_what_they_hold_and_what_crosses_their_edges() -> None:
    made = plan(pp=2, vpp=2, mbs=2, seq=64, layout="Et*3|tt||t*3L")
    hidden = (TensorSpec((2, 64, 256), "float32"),)
    assert [(s.stage, s.pp_rank, s.vpp_rank, s.receives, s.sends) for s in made.stages] == [
        (0, 0, 0, (), hidden),
        (1, 1, 0, hidden, hidden),
        (2, 0, 1, hidden, hidden),
        (3, 1, 1, hidden, ()),
    ]
    assert made.stages[0].layers == parse_layers(["embedding", "decoder.0", "decoder.1", "decoder.2"])
    assert made.stages[2].layers == ()
    assert made.stages[3].layers == parse_layers(["decoder.5", "decoder.6", "decoder.7", "loss"])


@pytest.mark.parametrize(
    ("values", "shape", "dtype"),
    [
        (dict(parallel__bf16=True), (1, 256, 256), "bfloat16"),
        (dict(parallel__fp16=True), (1, 256, 256), "float16"),
        (dict(parallel__params_dtype="bfloat16"), (1, 256, 256), "bfloat16"),
        (dict(parallel__bf16=True, parallel__pipeline_dtype="float32"), (1, 256, 256), "float32"),
        (dict(cp=2), (1, 128, 256), "float32"),
        (dict(tp=2, parallel__sequence_parallel=True), (1, 128, 256), "float32"),
    ],
)
def test_messages_have_the_shape_and_dtype_of_one_ranks_hidden_states(values, shape, dtype: str) -> None:
    assert plan(pp=2, **values).stages[0].sends == (TensorSpec(shape, dtype),)


def test_mtp_sends_its_hidden_states_along_to_the_loss() -> None:
    made = plan(pp=2, vpp=2, model__mtp_num_layers=1, layout="Et*4|t*4|m|L")
    assert [len(stage.sends) for stage in made.stages] == [1, 1, 2, 0]
    assert [len(stage.receives) for stage in made.stages] == [0, 1, 1, 2]


@pytest.mark.parametrize(
    ("values", "groups"),
    [
        (dict(), ()),
        (dict(model__share_embeddings_and_output_weights=True), (0, 3)),
        (dict(model__mtp_num_layers=1), (0, 3)),
        (dict(model__mtp_num_layers=1, model__share_embeddings_and_output_weights=True), (0, 3, 3)),
    ],
)
def test_parameters_with_several_uses_are_tied(values, groups: tuple[int, ...]) -> None:
    made = plan(pp=2, vpp=2, **values)
    assert made.tie_groups == ((("tok_embeddings.weight", groups),) if groups else ())
    table = 320 * 256
    assert sum(stage.replicated_params for stage in made.stages) == table * max(0, len(groups) - 1)


@pytest.mark.parametrize(
    "values", [dict(), dict(model__mtp_num_layers=1), dict(model__share_embeddings_and_output_weights=True)]
)
@pytest.mark.parametrize("sizes", [dict(), dict(pp=2), dict(pp=3, vpp=2)])
def test_no_parameter_is_lost_or_counted_twice(values, sizes) -> None:
    config, provenance = config_and_sources(**values, **sizes)
    made = build_plan(config, provenance)
    built = sum(stage.params - stage.replicated_params for stage in made.stages)
    assert built == made.params_total + made.params_mtp
    assert built == total_parameters(config.model) + mtp_parameters(config.model)
    assert sum(cost.params for cost in made.pp_ranks) == sum(stage.params for stage in made.stages)


def test_bytes_per_device_follow_from_precision_and_parallel_sizes() -> None:
    fp32, bf16 = plan(pp=2), plan(pp=2, parallel__bf16=True)
    for cost, half in zip(fp32.pp_ranks, bf16.pp_ranks, strict=True):
        assert (cost.weight_bytes, cost.gradient_bytes, cost.optimizer_bytes) == tuple(
            cost.params * n for n in (4, 4, 8)
        )
        assert (half.weight_bytes, half.gradient_bytes, half.optimizer_bytes) == tuple(
            cost.params * n for n in (2, 4, 12)
        )
        steady = cost.state_bytes + cost.buffer_bytes
        assert steady == 16 * cost.params + cost.buffer_bytes
        assert cost.peak_bytes == steady + cost.activation_bytes + cost.message_bytes
    assert plan(pp=2, tp=2).pp_ranks[0].weight_bytes < fp32.pp_ranks[0].weight_bytes
    experts = dict(pp=2, model__num_moe_experts=4, dp=2)
    assert plan(**experts, ep=2).pp_ranks[0].weight_bytes < plan(**experts).pp_ranks[0].weight_bytes


def test_full_sharding_holds_a_stage_while_it_computes() -> None:
    """At the peak all stages of a rank have begun and none has ended: whole weights, as under `optimizer_gradients`."""
    sizes = dict(pp=2, vpp=2, dp=2, gbs=16, mbs=1, parallel__bf16=True, model__vocab_size=1000)

    def ranks(sharding: str, **more: object) -> tuple[RankCost, ...]:
        return plan(**sizes, parallel__data_parallel_sharding=sharding, **more).pp_ranks

    for more in ({}, {"pipeline__pp_schedule": "gpipe"}):
        for full, sharded, whole in zip(*(ranks(way, **more) for way in SHARDINGS), strict=True):
            assert full.optimizer_bytes == sharded.optimizer_bytes == whole.optimizer_bytes // 2
            assert (full.weight_bytes, full.gradient_bytes) == (sharded.weight_bytes, sharded.gradient_bytes)
            assert full.peak_bytes == sharded.peak_bytes < whole.peak_bytes - full.optimizer_bytes // 2
    alone = sizes | {"dp": 1}
    assert plan(**alone, parallel__data_parallel_sharding="full").pp_ranks == plan(**alone).pp_ranks


SHARDINGS = ("full", "optimizer_gradients", "none")


def test_peak_activations_do_not_grow_with_microbatches_but_do_with_gpipe() -> None:
    few, many = plan(pp=4, gbs=8), plan(pp=4, gbs=64)
    assert [c.activation_bytes for c in few.pp_ranks] == [c.activation_bytes for c in many.pp_ranks]
    gpipe = plan(pp=4, gbs=64, pipeline__pp_schedule="gpipe")
    assert gpipe.pp_ranks[0].in_flight == 64


def test_predicted_bubble_is_the_textbooks_for_equal_stages() -> None:
    """E and L weigh next to nothing beside 24 layers each: (p - 1) / (m + p - 1)."""
    made = plan(pp=4, gbs=12, model__num_layers=96, model__vocab_size=1, cost__device="cpu")
    assert made.bubble_fraction == pytest.approx(3 / 15, abs=1e-3)
    assert made.step_time_s > 0
    assert made.time_calibrated is False


def test_a_rank_sees_its_own_part() -> None:
    made = plan(pp=2, vpp=2, nodes=1, gpus_per_node=4)
    part = made.for_rank(3)
    assert (part.rank, part.pp_rank, part.dp_rank) == (3, 1, 1)
    assert [stage.stage for stage in part.stages] == [1, 3]
    assert part.actions == made.schedule.actions[1]
    with pytest.raises(IndexError):
        made.for_rank(4)


@pytest.mark.parametrize(("limit", "codes"), [("1KiB", ["PP-E801"]), ("80GiB", []), ("much", ["PP-E103"]), (None, [])])
def test_a_peak_above_the_devices_memory_is_a_problem_of_a_plan_that_can_still_be_seen(limit, codes) -> None:
    made = plan(pp=2, launch__device_memory=limit)
    assert [problem.code for problem in made.problems] == codes


def test_memory_that_does_not_fit_names_the_rank_and_ways_that_fit() -> None:
    values = dict(pp=2, mbs=4, seq=512, launch__memory_reserve="1GiB")
    peak = max(cost.peak_bytes for cost in plan(**values).pp_ranks)
    limit = peak + 2**30 - 1
    (problem,) = plan(**values, launch__device_memory=str(limit)).problems
    assert "pp_rank 0" in problem.message
    for remedy in problem.remedy.splitlines():
        key, _, value = remedy.partition("=")
        value = int(value) if value.isdecimal() else value
        assert plan(**(values | {"launch__device_memory": str(limit), key.replace(".", "__"): value})).problems == ()


OVERLAP = dict(
    launch__transport="channels",
    parallel__batch_p2p_comm=False,
    parallel__batch_p2p_sync=False,
    parallel__overlap_p2p_comm=True,
)


@pytest.mark.parametrize(
    ("modes", "batched"),
    [
        (OVERLAP, False),
        (dict(OVERLAP, parallel__overlap_p2p_comm=False), True),
        (dict(parallel__batch_p2p_comm=True, parallel__overlap_p2p_comm=False), True),
    ],
)
def test_messages_are_batched_where_they_are_fused_or_must_not_overlap(modes, batched) -> None:
    made = plan(pp=2, vpp=2, **modes)
    assert made.schedule.batched is made.forward_schedule.batched is made.to_json()["schedule"]["batched"] is batched
    assert not made.problems and not verify(made.forward_schedule)


EXPERTS = OVERLAP | dict(pp=2, ep=2, dp=2, model__num_moe_experts=4, gbs=16, mbs=1)


def test_the_plain_transport_runs_no_pairs_is_priced_so_and_says_so() -> None:
    values = EXPERTS | dict(vpp=2, pipeline__pp_schedule="dualpipev")
    channels, plain = plan(**values), plan(**values | dict(launch__transport="plain"))
    assert channels.schedule.pairs and not channels.schedule.batched
    assert plain.schedule.batched and not plain.schedule.pairs and not plain.problems
    assert plain.bubble_fraction > channels.bubble_fraction
    assert "no forward beside a backward" in equation(plain, "transport")
    assert "transport" not in {derived.key for derived in channels.derived}


def test_an_overlap_of_experts_that_is_asked_for_runs_in_turns_on_the_plain_transport() -> None:
    asked = dict(parallel__overlap_moe_expert_parallel_comm=True)
    paired = plan(**EXPERTS | asked)
    plain, without = (plan(**EXPERTS | more | dict(launch__transport="plain")) for more in (asked, {}))
    assert paired.schedule.pairs and plain.schedule == without.schedule and not plain.problems
    assert "no forward beside a backward" in equation(plain, "transport")
    assert "no forward" not in equation(without, "transport")


def test_a_p2p_capacity_reaches_both_schedules() -> None:
    made = plan(pp=2, vpp=2, pipeline__p2p_capacity=4, **OVERLAP)
    assert set(made.schedule.capacities.values()) == {4}
    assert set(made.forward_schedule.capacities.values()) == {4}


@pytest.mark.parametrize("values", [dict(pp=2, vpp=2), dict(pp=3, vpp=2, gbs=6)])
def test_a_capacity_at_which_the_schedule_hangs_is_refused_with_capacities_that_work(values) -> None:
    values |= OVERLAP
    (problem,) = plan(**values, pipeline__p2p_capacity=1).problems
    assert "pipeline.p2p_capacity = 1 (command line)" in problem.place
    for remedy in problem.remedy.splitlines():
        text = remedy.partition("=")[2]
        assert plan(**values, pipeline__p2p_capacity=None if text == "null" else int(text)).problems == ()


def test_problems_that_are_known_already_come_first() -> None:
    known = Problem("PP-E103", "something else")
    assert plan_checked(*config_and_sources(), [known]).problems == (known,)
    with pytest.raises(ConfigError) as caught:
        plan_checked(*config_and_sources(gbs=3, dp=2), [known])
    assert [problem.code for problem in caught.value.problems] == ["PP-E103", "PP-E211"]


def test_the_digest_names_what_runs_and_not_where_values_came_from() -> None:
    config, provenance = config_and_sources(pp=2, vpp=2)
    made = build_plan(config, provenance)
    assert made.digest == build_plan(config, {}, title="other").digest
    assert made.digest != plan(pp=2, vpp=2, gbs=16).digest
    assert made.digest != plan(pp=2, vpp=2, seq=128).digest
    assert made.digest != plan(pp=2, vpp=2, layout="Ettt|t|tt|ttL").digest


def test_deepseek_v3_as_published() -> None:
    model = ModelConfig(
        num_layers=61,
        hidden_size=7168,
        ffn_hidden_size=18432,
        num_attention_heads=128,
        vocab_size=129280,
        multi_latent_attention=True,
        q_lora_rank=1536,
        num_moe_experts=256,
        moe_router_topk=8,
        moe_ffn_hidden_size=2048,
        moe_shared_expert_intermediate_size=2048,
        moe_layer_freq="[0]*3+[1]*58",
        moe_router_enable_expert_bias=True,
        mtp_num_layers=1,
    )
    config, provenance = config_and_sources(
        pp=16, vpp=2, ep=64, nodes=256, gpus_per_node=8, gbs=15360, seq=4096, layout="Et*3|(tt|)*29,m|L"
    )
    made = build_plan(replace(config, model=model), provenance)
    assert made.sizes.num_stages == 32
    assert (made.params_total, made.params_mtp, made.params_hf) == (671_026_419_200, 11_610_068_224, 684_489_845_504)
    assert made.tie_groups == (("tok_embeddings.weight", (0, 30)),)
    billions = [round(cost.params / 1e9, 3) for cost in made.pp_ranks]
    assert billions == [25.692, *[46.029] * 13, 35.551, 23.941]


def test_memory_is_told_in_the_unit_of_its_largest_number() -> None:
    assert [amount(size) for size in (2**10, 2**20 - 1, 2**20, 2**30 - 2**20, 2**30, 3 * 2**40)] == [
        "1.00 KiB", "1024.00 KiB", "1.00 MiB", "1023.00 MiB", "1.00 GiB", "3072.00 GiB"
    ]  # fmt: skip
    assert unit_for(2**30).of(2**20) == "0.00"
    assert unit_for(2**29).name == "MiB"


def test_products_in_8_bits_are_priced_as_such() -> None:
    wide: dict[str, object] = dict(model__hidden_size=4096, model__ffn_hidden_size=16384, model__num_attention_heads=32)
    wide |= dict(parallel__bf16=True, cost__device="h100")
    plain, eight, what_if = (plan(**wide, **more) for more in ({}, {"model__fp8": "e4m3"}, {"cost__matmul": "fp8"}))
    assert eight.timing == what_if.timing and eight.timing.pipeline_s < plain.timing.pipeline_s
