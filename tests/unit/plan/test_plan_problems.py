"""What allows no plan: every problem at once, with sources, and remedies that themselves make a plan."""

import shlex

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from unit_plan import config_values

from ppctl.config.compose import compose
from ppctl.config.resources import recipes
from ppctl.errors import ConfigError, Problem
from ppctl.launch.planning import planned
from ppctl.plan import build_plan, schedule_choice
from ppctl.plan.derivation import derive
from ppctl.plan.schedule_choice import Choice, settled
from ppctl.plan.sizes import beyond
from ppctl.plan.violations import ConfigValues, Rule, overrides_text, parse_overrides
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.simulate import in_flight


def problems_of(given_: ConfigValues) -> tuple[Problem, ...]:
    try:
        return build_plan(given_.config, given_.provenance).problems
    except ConfigError as error:
        return error.problems


def broken_rules(values: ConfigValues) -> set[Rule]:
    violations = beyond(values)
    derive(values, violations)
    return {violation.rule for violation in violations}


RULES = [
    (dict(pp=0), {"PP-E103"}),
    (dict(gbs=-1, mbs=0), {"PP-E103"}),
    (dict(pp=2, dp=3, nodes=1, gpus_per_node=4), {"PP-E203"}),
    (dict(pp=2, nodes=1, gpus_per_node=3), {"PP-E204"}),
    (dict(pp=4, nodes=1, gpus_per_node=2), {"PP-E204"}),
    (dict(tp=3, nodes=1, gpus_per_node=8), {"PP-E204", "PP-E207"}),
    (dict(ep=2, dp=3, gbs=9, model__num_moe_experts=4), {"PP-E205"}),
    (dict(ep=2), {"PP-E206"}),
    (dict(ep=3, dp=3, gbs=9, model__num_moe_experts=4), {"PP-E206"}),
    (dict(tp=16), {"PP-E207"}),
    (dict(cp=3, seq=256), {"PP-E208"}),
    (dict(cp=16, model__cp_comm_type="a2a"), {"PP-E223"}),
    (dict(cp=8, tp=2, model__cp_comm_type=["p2p"] * 7 + ["a2a"], model__num_query_groups=2), {"PP-E223"}),
    (dict(cp=4, model__cp_comm_type="a2a+p2p"), {"PP-E223"}),
    (dict(cp=2, model__cp_comm_type="a2a+p2p"), {"PP-E223"}),
    (dict(cp=4, parallel__hierarchical_context_parallel_sizes=[2, 2]), {"PP-E223"}),
    (dict(model__cp_comm_type="a2a+p2p", parallel__hierarchical_context_parallel_sizes=[2, 2]), {"PP-E223"}),
    (dict(cp=16, model__cp_comm_type="a2a+p2p", parallel__hierarchical_context_parallel_sizes=[4, 2]), {"PP-E223"}),
    (
        dict(cp=32, seq=256, model__cp_comm_type="a2a+p2p", parallel__hierarchical_context_parallel_sizes=[16, 2]),
        {"PP-E223"},
    ),
    (dict(cp=2, model__cp_comm_type="ring"), {"PP-E103"}),
    (dict(cp=4, parallel__hierarchical_context_parallel_sizes=[4, 1]), {"PP-E103"}),
    (dict(parallel__order="tp-dp-pp"), {"PP-E103"}),
    (dict(pp=2, dp=2, ep=2, model__num_moe_experts=4, parallel__order="tp-ep-pp-cp-dp"), {"PP-E225"}),
    (dict(model__num_moe_experts=4, model__moe_layer_freq="[0]*3+[1]*58"), {"PP-E210"}),
    (dict(gbs=7, dp=2), {"PP-E211"}),
    (dict(gbs=12, mbs=5), {"PP-E211"}),
    (dict(pp=2, vpp=2, pipeline__pp_schedule="1f1b"), {"PP-E213"}),
    (dict(pp=2, vpp=2, pipeline__pp_schedule="ZB-H2"), {"PP-E213"}),
    (dict(pp=2, vpp=1, pipeline__pp_schedule="v-half"), {"PP-E213"}),
    (dict(pp=2, vpp=4, pipeline__pp_schedule="v_min"), {"PP-E213"}),
    (dict(gbs=90, pp=4), {"PP-E214"}),
    (dict(gbs=100, pp=4, vpp=2, mbs=2), {"PP-E214"}),
    (dict(model__num_layers=10**9), {"PP-E103"}),
    (dict(pp=10**9), {"PP-E103"}),
    (dict(pp=1024, vpp=4096), {"PP-E214"}),
    (dict(pp=1024, vpp=5), {"PP-E214"}),
    (dict(layout="Et*8" + "|" * 5000 + "L"), {"PP-E214"}),
    (dict(pp=2, nodes=2**20, gpus_per_node=2**20), {"PP-E214"}),
    (dict(cp=2**10, dp=2**11, gbs=2**11, seq=2**12), {"PP-E214"}),
    (dict(pp=10, vpp=2, gbs=8, pipeline__pp_schedule="zbvzerobubble"), {"PP-E214"}),
    (dict(pp=2, layout="auto", model__num_layers=257), {"PP-E214"}),
    (dict(pp=65, layout="auto", gbs=2), {"PP-E214"}),
    (dict(pp=64, layout="auto", gbs=2, model__num_layers=64, model__mtp_num_layers=1), {"PP-E214"}),
    (dict(pp=2, nodes=1048573, gpus_per_node=1048571), {"PP-E204"}),
    (dict(pipeline__pp_schedule="zigzag"), {"PP-E103"}),
    (dict(pp=8, vpp=1, layout="Et*2|t*2|t|t|t|tL"), {"PP-E220"}),
    (dict(pp=3, layout="Et*4|t*4L"), {"PP-E220"}),
    (dict(pp=2, vpp=2, layout="Et*4|t*4L"), {"PP-E220"}),
    (dict(pp=2, train__recompute_granularity="full", train__recompute_stages=[1, 2]), {"PP-E217"}),
    (dict(pp=2, parallel__cpu_offloading=True, parallel__cpu_offloading_num_layers=9), {"PP-E226"}),
    (dict(gbs=8, mbs=2, pipeline__pp_batch_size=3), {"PP-E211"}),
    (dict(gbs=8, dp=2, pipeline__pp_batch_size=3), {"PP-E211"}),
    (dict(pipeline__pp_batch_size=0), {"PP-E103"}),
    (dict(pp=2, layout="Et*4|t*5L"), {"PP-E015"}),
    (dict(pp=2, layout="Et*4|t*4x"), {"PP-E001"}),
    (dict(pp=2, vpp=2, layout="Et*3|t*4L", gbs=7, dp=2), {"PP-E220", "PP-E015", "PP-E211"}),
]


@pytest.fixture(autouse=True)
def short_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit on a plan's length is reached at once, so that nothing long is built here."""
    monkeypatch.setattr(schedule_choice, "MOST_ACTIONS", 700)


def test_a_batch_of_a_billion_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (problem,) = problems_of(config_values(gbs=2**31))
    assert problem.code == "PP-E214"


def named(value: dict[str, object] | set[str]) -> str:
    """A case's name, the same in every process: a set has another order in each."""
    return " ".join(sorted(value) if isinstance(value, set) else value)


@pytest.mark.parametrize(("values", "codes"), RULES, ids=named)
def test_a_broken_rule_is_told_by_its_code(values: dict[str, object], codes: set[str]) -> None:
    found = problems_of(config_values(**values))
    assert {problem.code for problem in found} == codes
    assert all(problem.remedy and problem.place for problem in found)


@pytest.mark.parametrize(("values", "codes"), RULES, ids=named)
def test_every_remedy_mends_its_problem_and_breaks_nothing_else(values: dict[str, object], codes: set[str]) -> None:
    start = config_values(**values)
    before = problems_of(start)
    for problem in before:
        for line in problem.remedy.splitlines():
            after = problems_of(start.overridden(parse_overrides(line)))
            assert len(after) < len(before), f"{problem} -- {line} -> {after}"
            assert len(before) > 1 or after == ()


@pytest.mark.parametrize(
    ("values", "remedies"),
    [
        (dict(gbs=2), ["gbs=4", "pipeline.pp_schedule=interleaved_1f1b"]),
        (dict(gbs=4, mbs=2), ["mbs=1", "gbs=8"]),
        (
            dict(gbs=8, pipeline__pp_batch_size=2),
            ["pipeline.pp_batch_size=4", "pipeline.pp_schedule=interleaved_1f1b"],
        ),
        (
            dict(gbs=2, pipeline__put_off_limit=1),
            ["gbs=4", "pipeline.pp_schedule=interleaved_1f1b pipeline.put_off_limit=null"],
        ),
    ],
)
def test_too_few_microbatches_for_dualpipev_are_refused_with_what_is_enough(values, remedies) -> None:
    values["pipeline__pp_schedule"] = "dualpipev"
    start = config_values(pp=2, vpp=2, **values)
    (problem,) = problems_of(start)
    assert problem.code == "PP-E304"
    assert "needs 4 or more microbatches" in problem.message
    assert problem.remedy.splitlines() == remedies
    assert all(problems_of(start.overridden(parse_overrides(line))) == () for line in remedies)


def test_disagreeing_values_are_named_with_their_sources_and_two_ways_out() -> None:
    config, provenance = (
        config_values(pp=8, vpp=1, layout="Et*3|(tt|)*29,m|L", model__num_layers=61, model__mtp_num_layers=1),
        {},
    )
    provenance = dict(config.provenance) | {
        "parallel.virtual_pipeline_model_parallel_size": "recipe x (recipes/x.yaml:9)"
    }
    with pytest.raises(ConfigError) as caught:
        build_plan(config.config, provenance)
    (problem,) = caught.value.problems
    told = str(problem)
    for part in ("32 stages", "pp 8 x vpp 1 = 8", "vpp=4", "(command line)", "(recipe x (recipes/x.yaml:9))"):
        assert part in told
    assert len(problem.remedy.splitlines()) == 2


def test_all_problems_are_told_at_once() -> None:
    codes = [p.code for p in problems_of(config_values(pp=2, vpp=2, layout="Et*3|t*5L", gbs=7, dp=2, ep=2, tp=3))]
    assert {"PP-E206", "PP-E207", "PP-E220"} <= set(codes)


def test_a_typed_layout_is_never_changed() -> None:
    start = config_values(pp=2, layout="Et*4|t*4L")
    assert start.overridden({"pp": 4})["layout"] == "Et*4|t*4L"
    config, provenance = start.config, dict(start.provenance)
    provenance["parallel.pipeline_model_parallel_layout"] = "recipe x (recipes/x.yaml:9)"
    assert ConfigValues(config, provenance).overridden({"pp": 4})["layout"] is None
    assert ConfigValues(config, provenance).overridden({"pp": 2})["layout"] == "Et*4|t*4L"


@pytest.mark.parametrize(
    "overrides",
    [
        {"pp": 4},
        {"vpp": 1, "layout": None},
        {"layout": "Et*3|(tt|)*29,m|L", "vpp": 2},
        {"model.moe_layer_freq": "[0]*3+[1]*58"},
        {"model.moe_layer_freq": "[0]+[1]"},
        {"parallel.hierarchical_context_parallel_sizes": [2, 4], "model.cp_comm_type": ["p2p", "a2a+p2p"]},
    ],
)
def test_a_command_reads_back(overrides) -> None:
    assert parse_overrides(overrides_text(overrides)) == overrides
    assert all("=" in word for word in shlex.split(overrides_text(overrides)))


def test_hopeless_text_is_no_override() -> None:
    assert parse_overrides("ppctl --help") == {}
    assert parse_overrides("'unbalanced") == {}


small = st.integers(1, 6)
optional = st.none() | small
layouts = st.none() | st.sampled_from(
    ["Et*4|t*4L", "Ett|tt|tt|ttL", "Et*3|t*5L", "Et*8L", "E|t*8|L", "Et|t|t|t|t|t|t|tL", "Et*7|L", "Et*4|t*4mL"]
)


@settings(max_examples=150)
@given(
    st.fixed_dictionaries(
        dict(
            pp=small,
            vpp=optional,
            dp=optional,
            nodes=optional,
            gpus_per_node=optional,
            mbs=small,
            gbs=st.integers(1, 40),
        ),
        optional=dict(
            tp=st.sampled_from([1, 2, 3]),
            ep=st.sampled_from([1, 2, 3]),
            model__num_moe_experts=st.sampled_from([None, 4, 6]),
            layout=layouts,
            pipeline__pp_schedule=st.sampled_from(["1f1b", "gpipe", "interleaved1f1b"]),
        ),
    )
)
def test_whatever_disagrees_each_remedy_is_accepted(values: dict[str, object]) -> None:
    start = config_values(**{key: value for key, value in values.items() if value is not None})
    rules = broken_rules(start)
    assume(rules)
    for problem in problems_of(start):
        for line in problem.remedy.splitlines():
            after = broken_rules(start.overridden(parse_overrides(line)))
            assert after < rules, f"{values}: {problem.code} {line}"


moe = dict(model__num_moe_experts=8, model__moe_ffn_hidden_size=512)


@settings(max_examples=25, deadline=None)
@given(
    st.fixed_dictionaries(
        dict(
            pp=st.sampled_from([1, 2, 3]), dp=st.sampled_from([1, 2, 4]), mbs=st.sampled_from([1, 4]), gbs=st.just(16)
        ),
        optional=dict(
            experts=st.just(moe),
            ep=st.sampled_from([2, 3]),
            nodes=st.sampled_from([1, 3]),
            gpus_per_node=st.sampled_from([1, 4]),
            parallel__data_parallel_sharding=st.sampled_from(["optimizer_gradients", "full"]),
            train__recompute_granularity=st.just("full"),
            layout=st.sampled_from(["Et*4|t*4L", "Et*6|ttL", "Et*8L"]),
        ),
    ),
    st.integers(8, 200),
)
def test_under_a_memory_limit_each_remedy_fits_as_well(values: dict[str, object], mib: int) -> None:
    values |= values.pop("experts", {})
    start = config_values(**values, launch__device_memory=f"{mib + 10}MiB", launch__memory_reserve="10MiB")
    before = problems_of(start)
    assume(before)
    for problem in before:
        assert problem.remedy
        for line in problem.remedy.splitlines():
            after = problems_of(start.overridden(parse_overrides(line)))
            assert {p.code for p in after} < {p.code for p in before}, f"{problem} -- {line} -> {after}"
            assert len(before) > 1 or after == ()


BREADTH_FIRST = dict(pp=2, vpp=4, dp=4, gbs=16, mbs=1, seq=64, pipeline__pp_schedule="gpipe")


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (dict(train__recompute_granularity="full"), "parallel.data_parallel_sharding=full"),
        ({}, "train.recompute_granularity=full parallel.data_parallel_sharding=full"),
    ],
)
def test_sharing_out_weights_is_offered_where_it_makes_room(values: dict[str, object], remedy: str) -> None:
    limit = dict(launch__device_memory="108MiB", launch__memory_reserve="10MiB")
    start = config_values(**BREADTH_FIRST, **values, **limit)
    (problem,) = problems_of(start)
    assert problem.code == "PP-E801"
    assert remedy in problem.remedy.splitlines()
    assert all(problems_of(start.overridden(parse_overrides(line))) == () for line in problem.remedy.splitlines())


@pytest.mark.parametrize(
    ("overrides", "codes", "remedies"),
    [
        (["ep=2"], ["PP-E801"], ["ep=32", "ep=64"]),
        (["nodes=2"], ["PP-E205"], ["nodes=128", "dp=64 nodes=null gpus_per_node=null"]),
        (["nodes=3"], ["PP-E204"], ["nodes=128", "nodes=64 gpus_per_node=16"]),
        (["pipeline.put_off_limit=null"], ["PP-E801"], ["pipeline.put_off_limit=8", "pipeline.put_off_limit=4"]),
    ],
)
def test_deepseek_v3_on_its_own_cluster_is_never_advised_into_a_full_device(
    overrides: list[str], codes: list[str], remedies: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    _, _, problems = planned(["+recipe=deepseek_v3", *overrides])
    assert [problem.code for problem in problems] == codes
    assert problems[0].remedy.splitlines()[: len(remedies)] == remedies
    for line in remedies:
        words = dict(word.split("=", 1) for word in (*overrides, *shlex.split(line)))
        _, plan, after = planned(["+recipe=deepseek_v3", *(f"{key}={value}" for key, value in words.items())])
        assert plan is not None
        assert after == []


@pytest.mark.parametrize("sizes", [("1f1b", 4, 1, 4), ("interleaved_1f1b", 4, 2, 4), ("interleaved_1f1b", 3, 3, 5),
                                   ("interleaved_1f1b", 4, 2, 8)])  # fmt: skip
def test_remedies_are_weighed_with_so_few_microbatches_that_ranks_hold_the_same(sizes) -> None:
    name, pp, vpp, group = sizes
    asked = config_values(pp=pp, vpp=vpp, parallel__microbatch_group_size_per_vp_stage=group)
    for count in (1, 2, 3, 5, 8, 17, 18, 19, 20, 31, 35, 48, 63):
        few = settled(asked, Choice(name), count)
        held = [
            (in_flight(schedule), lower(schedule).capacities)
            for schedule in (
                make_schedule(name, pp=pp, vpp=vpp, num_microbatches=number, microbatch_group_size=group)
                for number in {count, few}
            )
        ]
        assert held[0] == held[-1], (count, few)
    assert few < 63


@pytest.mark.parametrize("recipe", sorted(set(recipes()) - {"quickstart"}))
def test_every_recipe_names_its_device_and_the_memory_that_its_plan_is_held_against(recipe: str) -> None:
    config = compose([f"+recipe={recipe}"]).config
    assert config.cost.device is not None
    assert config.launch.device_memory == "80GiB"


@pytest.mark.parametrize(
    ("typed", "keys"),
    [
        (["pipeline.pp_schedule=foo"], ["pipeline.pp_schedule"]),
        (["launch.device_memory=much"], ["launch.device_memory"]),
        (["cost.device=h9"], ["cost.device"]),
        (["cost.allocator=mine"], ["cost.allocator"]),
        (["launch.device_memory=much", "pipeline.pp_schedule=foo"], ["launch.device_memory", "pipeline.pp_schedule"]),
        (["pp=0", "gbs=-1"], ["parallel.pipeline_model_parallel_size", "train.global_batch_size"]),
    ],
)
def test_a_value_that_is_no_value_is_told_once(typed: list[str], keys: list[str]) -> None:
    _, _, problems = planned(typed)
    assert [problem.place.partition(" = ")[0] for problem in problems] == keys
