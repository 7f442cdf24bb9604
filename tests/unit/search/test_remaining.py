"""What a run goes on with where nodes are lost: the order of ways, and what none of them changes."""

from __future__ import annotations

from math import inf
from pathlib import Path

import pytest

from ppctl.config.argv import full_name
from ppctl.config.keys import keys_with
from ppctl.launch.planning import planned
from ppctl.plan.build import plan_alone
from ppctl.plan.sizes import CALL
from ppctl.plan.violations import ConfigValues, overrides_text
from ppctl.search.answer import BAND
from ppctl.search.branch import CLOSE
from ppctl.search.remaining import INSIDE, Remaining, Whole, least_nodes, remaining
from ppctl.search.space import SearchSpace
from tests.helpers.small_spaces import all_plans

MODEL = (
    *("model.num_layers=12", "model.hidden_size=512", "model.num_attention_heads=8", "model.ffn_hidden_size=1024"),
    *("model.vocab_size=8192", "launch.device=cuda", "cost.device=h100", "parallel.bf16=true", "seq=512"),
    *("launch.device_memory=8GiB", "launch.memory_reserve=0GiB", "gpus_per_node=2"),
)
EXPERTS = ("model.num_moe_experts=8", "model.moe_router_topk=2", "model.moe_ffn_hidden_size=256")
RUNS = {
    "replicas divide the batch": ("nodes=6", "pp=2", "gbs=60"),
    "a batch that is a power of two": ("nodes=4", "pp=4", "gbs=64"),
    "tensor parallelism": ("nodes=4", "pp=2", "tp=2", "sp=true", "gbs=16", "mbs=2"),
    "experts": ("nodes=4", "pp=2", "ep=4", "gbs=32", *EXPERTS),
    "sizes are typed": (
        "nodes=4",
        "dp=2",
        "pp=4",
        "vpp=3",
        "layout=Et|(t|)*10tL",
        "gbs=24",
        "pp_schedule=interleaved_1f1b",
    ),
    "only the world is given": ("gpus_per_node=2", "dp=4", "pp=2", "gbs=16"),
    "a schedule that is searched for": ("nodes=3", "pp=3", "gbs=12", "pp_schedule=auto"),
    "a layout that is searched for": ("nodes=3", "pp=3", "gbs=12", "layout=auto"),
    "a batch that grows": ("nodes=4", "pp=2", "gbs=48", "train.batch_rampup=[24,24,96]", "steps=100"),
}


def whole_of(*words: str) -> Whole:
    composed, plan, problems = planned([*MODEL, *words])
    assert plan is not None and not problems, problems
    return Whole(ConfigValues(composed.config, composed.provenance), plan)


def found(whole: Whole, nodes: int) -> Remaining:
    answer = remaining(whole, nodes)
    assert answer is not None
    return answer


@pytest.mark.parametrize("name", RUNS)
def test_an_answer_is_the_plan_of_the_words_that_it_changes_and_none_of_them_changes_what_is_computed(
    name: str,
) -> None:
    whole = whole_of(*RUNS[name])
    inside = [getattr(whole.plan.sizes, axis) for axis in ("tp", "cp", "etp")]
    for nodes in range(1, whole.nodes):
        answer = found(whole, nodes)
        assert answer.nodes <= nodes and not {*answer.words} & {*keys_with("mathematics")}
        assert not {full_name(key) for key in (*INSIDE, "gbs")} & {*answer.words}
        replaced = {full_name(word.partition("=")[0]) for word in overrides_text(answer.words).split()}
        kept = [word for word in RUNS[name] if full_name(word.partition("=")[0]) not in replaced]
        _, plan, problems = planned([*MODEL, *kept, *overrides_text(answer.words).replace("'", "").split()])
        assert plan is not None and not problems
        assert (plan.layout, plan.sizes) == (answer.plan.layout, answer.plan.sizes)
        assert plan.schedule.actions == answer.plan.schedule.actions
        assert plan.sizes.world == answer.nodes * whole.per_node
        assert [getattr(plan.sizes, axis) for axis in ("tp", "cp", "etp")] == inside
        samples = plan.sizes.dp * plan.num_microbatches * plan.gradient_accumulation_steps * whole.values["mbs"]
        assert samples == whole.values["gbs"]


def test_groups_that_fill_no_longer_pipeline_only_rule_it_out() -> None:
    groups = ("pp_schedule=interleaved_1f1b", "parallel.microbatch_group_size_per_vp_stage=4")
    assert remaining(whole_of("nodes=4", "pp=4", "vpp=3", "layout=null", "gbs=16", *groups), 3) is not None


def test_the_present_cut_stays_where_its_replicas_divide_the_batch() -> None:
    whole = whole_of(*RUNS["replicas divide the batch"])
    answers = [found(whole, nodes) for nodes in (5, 3, 1)]
    assert [(each.nodes, each.plan.sizes.dp, each.plan.sizes.pp, each.why) for each in answers] == [
        (5, 5, 2, ""),
        (3, 3, 2, ""),
        (1, 1, 2, ""),
    ]
    assert [each.plan.num_microbatches for each in answers] == [12, 20, 60]


@pytest.mark.parametrize("name", ["a batch that is a power of two", "experts", "tensor parallelism"])
def test_another_cut_is_taken_only_if_it_is_faster_by_more_than_plans_err_and_then_none_is_faster(name: str) -> None:
    whole = whole_of(*RUNS[name])
    answer = found(whole, 3)
    assert answer.why
    steps = {}
    for nodes in (1, 2, 3):
        for of, plan in all_plans(SearchSpace(whole.on(nodes), (*INSIDE, "recompute", "pp_schedule"))).items():
            if of.data_parallel_sharding == "none" and of.recomputation == "as given":
                steps[nodes, of] = plan.step_time_s
    replicas = [plan_alone(whole.on(nodes)) for nodes in (1, 2, 3)]
    fewer = min((plan.step_time_s for plan in replicas if plan is not None), default=inf)
    best = min(steps.values())
    if answer.plan.sizes.pp == whole.plan.sizes.pp and "parallel.expert_model_parallel_size" not in answer.words:
        assert answer.plan.step_time_s == fewer and best >= (1 - BAND) * fewer * (1 - CLOSE)
    else:
        assert answer.plan.step_time_s < (1 - BAND) * fewer
        assert answer.plan.step_time_s <= best / (1 - CLOSE)


def test_a_schedule_of_a_file_is_called_more_often(tmp_path: Path) -> None:
    words = ("nodes=4", "pp=2", "gbs=16")
    from ppctl.schedule.simulate import to_slots

    file = tmp_path / "four.csv"
    file.write_text(to_slots(whole_of(*words).plan.schedule), encoding="utf-8")
    whole = whole_of(*words, f"pp_schedule_csv={file}")
    answer = found(whole, 2)
    assert answer.words == {"launch.nodes": 2, CALL: 4}
    assert (answer.plan.num_microbatches, answer.plan.gradient_accumulation_steps) == (4, 2)
    assert answer.plan.schedule.actions == whole.plan.schedule.actions


def test_the_least_number_of_nodes_on_which_something_fits_is_found() -> None:
    words = ("nodes=8", "pp=4", "gbs=32", "model.num_layers=16")
    peak = whole_of(*words).plan.peak_bytes
    whole = whole_of(*words, f"launch.device_memory={peak // 2**20 + 1}MiB")
    answers = {nodes: remaining(whole, nodes) for nodes in range(1, 8)}
    fitting = [nodes for nodes, answer in answers.items() if answer is not None]
    least = min(fitting)
    assert 1 < least < 8 and fitting == list(range(least, 8))
    assert {least_nodes(whole, nodes) for nodes in range(1, least)} == {least}


def test_memory_is_given_up_where_nothing_else_fits() -> None:
    words = ("nodes=4", "pp=2", "gbs=32", "parallel.data_parallel_sharding=optimizer_gradients")
    peak = whole_of(*words).plan.peak_bytes
    whole = whole_of(*words, f"launch.device_memory={peak // 2**20 + 1}MiB")
    answer = found(whole, 2)
    assert "is planned to need" in answer.why
    assert {"parallel.data_parallel_sharding", "train.recompute_granularity"} & {*answer.words}
    assert answer.plan.limit is not None and answer.plan.peak_bytes <= answer.plan.limit.available_bytes
