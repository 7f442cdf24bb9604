"""The search is what planning every configuration is, and no bound is above a plan."""

from __future__ import annotations

from heapq import heappop

import pytest

from ppctl.config.compose import compose
from ppctl.plan import Plan
from ppctl.plan.build import plan_alone
from ppctl.plan.violations import ConfigValues
from ppctl.search.bounds import Division
from ppctl.search.branch import CLOSE, Search
from ppctl.search.rounds import FILLED
from ppctl.search.space import Configuration, SearchSpace
from tests.helpers.small_spaces import all_plans, every, space

SPACES = [*range(12), 35, *(pytest.param(seed, marks=pytest.mark.whole) for seed in range(12, 200) if seed != 35)]
"""In 35 the stage prices of a division depend on pp: dp comes first in the order of the axes."""


def peak(plan: Plan) -> int:
    return max(cost.peak_bytes for cost in plan.pp_ranks)


def fits(plan: Plan) -> bool:
    return plan.limit is None or peak(plan) <= plan.limit.available_bytes


@pytest.mark.parametrize("seed", SPACES)
def test_the_search_finds_what_planning_every_configuration_finds_and_no_bound_is_above_a_plan(seed: int) -> None:
    drawn = space(seed)
    plans = all_plans(drawn)
    search = Search(drawn)
    for _ in search.run():
        pass
    assert search.proved
    counts = search.counts
    assert counts.total >= len(list(every(drawn)))
    assert counts.total == counts.memory + counts.rules + counts.planned + counts.left
    fitting = [plan.step_time_s for plan in plans.values() if fits(plan)]
    assert bool(fitting) == bool(search.found)
    if fitting:
        assert search.found[0].plan.step_time_s <= min(fitting) / (1 - CLOSE)
        assert search.found[0].plan == plans[search.found[0].configuration]
    _divided_to_the_end(Search(drawn), plans)


@pytest.mark.parametrize("seed", [0, 3, 8])
def test_there_is_an_answer_before_other_divisions_of_the_ranks_are_looked_at(seed: int) -> None:
    search, seen = Search(space(seed)), 0
    for _ in search.run():
        seen = seen or (search.counts.total if search.found else 0)
    assert 0 < seen < search.counts.total


def drawn_of(*words: str) -> SearchSpace:
    shape = ["model.num_layers=8", "model.hidden_size=512", "model.num_attention_heads=8", "model.vocab_size=8192"]
    composed = compose([*shape, "gbs=8", "seq=128", "gpus_per_node=4", *words])
    return SearchSpace(ConfigValues(composed.config, composed.provenance))


@pytest.mark.parametrize(
    ("words", "chunks"), [(("vpp=null",), {1}), (("vpp=null", "layout=Et|t|t|t|t|t|t|tL", "pp=2"), {4})]
)
def test_a_null_for_vpp_follows_the_layout(words: tuple[str, ...], chunks: set[int]) -> None:
    drawn = drawn_of("tp=2", "mbs=1", "recompute=null", *words)
    assert {of.vpp for of in every(drawn)} == chunks
    assert all(plan.sizes.vpp == of.vpp for of, plan in all_plans(drawn).items())


def test_a_null_for_the_file_of_a_schedule_fixes_no_schedule() -> None:
    assert drawn_of("pp_schedule_csv=null").schedules(2, 2) == drawn_of().schedules(2, 2)


def test_a_null_for_etp_follows_tp() -> None:
    drawn = drawn_of("etp=null", "pp=1", "mbs=1", "model.num_moe_experts=4", "model.moe_ffn_hidden_size=128")
    assert {(of.tp, of.etp) for of in drawn.axes()} == {(1, 1), (2, 2), (4, 4)}


def test_groups_that_do_not_fill_a_pipeline_are_against_a_rule() -> None:
    groups = "pp_schedule=interleaved_1f1b", "parallel.microbatch_group_size_per_vp_stage=2"
    drawn = drawn_of("tp=1", "cp=1", "mbs=1", "recompute=null", *groups)
    search = Search(drawn)
    for _ in search.run():
        pass
    assert {of.pp for of in every(drawn)} == {1, 2, 4}
    assert search.counts.rules and {each.configuration.pp for each in search.found} <= {1, 2}
    _divided_to_the_end(Search(drawn), all_plans(drawn))


def test_weights_that_megatron_gathers_layer_by_layer_are_not_held_all_at_once() -> None:
    shape = ["num_layers=16", "hidden_size=1024", "num_attention_heads=8", "ffn_hidden_size=4096", "vocab_size=8192"]
    words = ["launch.device=cuda", "cost.device=h100", "parallel.bf16=true", "seq=128", "gbs=8", "gpus_per_node=8"]
    words += ["cost.stack=megatron", "parallel.data_parallel_sharding=full", "launch.device_memory=80GiB"]
    composed = compose([*(f"model.{word}" for word in shape), *words])
    drawn = SearchSpace(ConfigValues(composed.config, composed.provenance))
    of = Configuration(1, 1, 1, 1, 1, 1, "full", 1, "1f1b", "full")
    plan, sizes = plan_alone(drawn.values_of(of)), drawn.sizes(of)
    assert plan is not None and sizes is not None
    division, whole = Division(drawn.values_of(of).config, sizes), Search(drawn).tree.whole
    state = division.state(whole, [0], "full")
    assert division.certain(state, "full") <= peak(plan) < state.optimizer + state.weights


def test_a_typed_sharding_divides_nothing_where_there_are_no_replicas() -> None:
    shape = ["num_layers=8", "hidden_size=512", "num_attention_heads=8", "ffn_hidden_size=2048", "vocab_size=4096"]
    words = ["launch.device=cuda", "cost.device=h100", "seq=128", "gbs=8", "mbs=1", "gpus_per_node=2", "pp=2", "vpp=1"]
    words += ["pipeline.pp_schedule=1f1b", "parallel.data_parallel_sharding=full", "launch.memory_reserve=0"]
    words += [f"model.{word}" for word in shape]

    def drawn(memory: int) -> SearchSpace:
        composed = compose([*words, "train.recompute_granularity=full", f"launch.device_memory={memory}"])
        return SearchSpace(ConfigValues(composed.config, composed.provenance))

    plan = plan_alone(drawn(2**36).values)
    assert plan is not None
    search = Search(drawn(peak(plan)))
    for _ in search.run():
        pass
    assert [found.plan.step_time_s for found in search.found] == [plan.step_time_s]
    assert "parallel.data_parallel_sharding" not in search.space.words(search.found[0].configuration)


def _divided_to_the_end(search: Search, plans: dict[object, Plan]) -> None:
    """Every branch's bound is at most those of its parts and of its plan, and what memory cuts off does not fit."""
    tree, bounds = search.tree, {}
    for axes in search.space.axes():
        tree.open(axes)
    while tree.heap:
        branch = heappop(tree.heap)
        made = max((part.number for part in tree.heap), default=0)
        if branch.level == "plan":
            bounds[branch.parts[0]] = branch.seconds
        else:
            if branch.level == "simulated" and branch.parts[0] in plans:
                of, pipeline, batch = branch.parts
                held = pipeline.peak(tree.rounds(of, batch[1], FILLED), batch[1], of.data_parallel_sharding)
                assert held <= peak(plans[of]) + 1, of
            tree.divide(branch)
            parts = [part for part in tree.heap if part.number > max(made, branch.number)]
            assert all(branch.seconds <= part.seconds * (1 + 1e-9) for part in parts)
    for of, plan in plans.items():
        if of in bounds:
            assert bounds[of] <= plan.step_time_s * (1 + 1e-9), of
        else:
            assert not fits(plan), of
