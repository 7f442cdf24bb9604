"""By how many nodes tokens are dispatched to their experts, and what the plan says of it."""

import itertools

import pytest

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.launch.planning import planned
from ppctl.plan.dispatch_nodes import dispatch_nodes, dispatch_obstacle
from ppctl.topology import ParallelSizes, RankGrid


def model(experts=8, topk=2, groups=None, kept=None):
    limits = dict(moe_router_num_groups=groups, moe_router_group_topk=kept)
    return ModelConfig(num_moe_experts=experts, moe_router_topk=topk, **limits)


WORLDS = [
    # sizes, ranks of a node, nodes of an ep group
    (dict(world=64, dp=64, ep=64), 8, 8),
    (dict(world=64, dp=64, ep=8, edp=8), 8, 1),
    (dict(world=64, dp=64, ep=4, edp=16), 8, 1),
    (dict(world=64, tp=4, dp=16, etp=4, ep=16), 8, 8),
    (dict(world=64, tp=8, dp=8, etp=8, ep=8), 8, 8),
    (dict(world=64, tp=8, dp=8, etp=1, ep=64), 8, 8),
    (dict(world=48, dp=48, ep=6, edp=8), 8, None),
    (dict(world=24, dp=24, ep=12, edp=2), 8, None),
    (dict(world=64, dp=64, ep=16, edp=4), 64, 1),
    (dict(world=64, dp=64, ep=8, edp=8, order="tp-cp-dp-ep-pp"), 8, 8),
]


@pytest.mark.parametrize(("sizes", "per_node", "nodes"), WORLDS)
def test_groups_lie_on_so_many_whole_nodes(sizes, per_node, nodes):
    made = ParallelSizes(**sizes)
    assert made.nodes_along("ep", per_node) == nodes
    for group in RankGrid(made).groups("ep"):
        places = [rank // per_node for rank in group]
        runs = [len(list(own)) for _, own in itertools.groupby(places)]
        if nodes is not None:
            assert len(runs) == len({*places}) == nodes
            assert len({*runs}) == 1
    if nodes is None:
        groups = [[rank // per_node for rank in group] for group in RankGrid(made).groups("ep")]
        assert any(len({places.count(node) for node in places}) > 1 for places in groups)


def config_of(dispatch, per_node, own, world=8):
    config = RunConfig(model=own)
    config.parallel.expert_dispatch = dispatch
    config.launch.nodes, config.launch.gpus_per_node = world // per_node, per_node
    return config


@pytest.mark.parametrize("dispatch", ["flat", "by_node", "auto"])
@pytest.mark.parametrize("per_node", [1, 2, 4, 8])
def test_auto_goes_by_node_wherever_it_can(dispatch, per_node):
    config = config_of(dispatch, per_node, model())
    sizes = ParallelSizes(8, dp=8, ep=8)
    assert dispatch_nodes(config, sizes) == (1 if dispatch == "flat" else 8 // per_node)


def test_sums_of_whole_runs_alone_are_made_on_a_node():
    halves = config_of("auto", 1, model(16, 4, 4, 2))
    assert "8 nodes cannot share 4 evenly" in dispatch_obstacle(halves, ParallelSizes(8, dp=8, ep=8))
    assert dispatch_nodes(halves, ParallelSizes(8, dp=8, ep=8)) == 1


def planned_with(*overrides):
    _, plan, problems = planned(overrides)
    return plan, problems


def line(plan, name):
    return next((each for each in plan.derived if each.key == name), None)


def test_the_plan_says_which_way_tokens_go_and_why():
    by_node, _ = planned_with("+recipe=deepseek_v3")
    assert line(by_node, "expert_dispatch").value == "by_node"
    assert "once to each of 4 of 8 nodes of 8 ranks" in line(by_node, "expert_dispatch").equation
    flat, _ = planned_with("+recipe=deepseek_v3", "parallel.expert_dispatch=flat")
    assert line(flat, "expert_dispatch").value == "flat"
    assert "parallel.expert_dispatch=flat, command line" in line(flat, "expert_dispatch").equation
    inside, _ = planned_with("+recipe=qwen3_30b_a3b")
    assert "all ep 8 ranks of a group are on one node of 8" in line(inside, "expert_dispatch").equation
    assert line(planned_with("+recipe=qwen3_8b")[0], "expert_dispatch") is None


def test_by_node_is_faster_in_the_plan_and_sends_less_over_the_network():
    by_node, flat = (
        planned_with("+recipe=deepseek_v3", f"parallel.expert_dispatch={each}")[0] for each in ("by_node", "flat")
    )
    assert by_node.timing.tokens_per_s > 1.1 * flat.timing.tokens_per_s
    network = {each.axis: each.bytes for each in by_node.traffic[1]}["ep-outer"]
    assert network < 0.46 * max(each.bytes for each in flat.traffic[1] if each.axis == "ep")


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b", "qwen3_8b"])
def test_by_node_on_one_machine_is_refused_with_a_remedy_that_works(recipe):
    _, problems = planned_with(f"+recipe={recipe}", "parallel.expert_dispatch=by_node")
    (problem,) = problems
    assert problem.code == "PP-E227"
    for remedy in problem.remedy.splitlines():
        assert not planned_with(f"+recipe={recipe}", remedy)[1]


def test_the_plan_says_what_it_takes_to_repeat_no_exchange():
    whole = "train.recompute_modules=[layernorm,mla_up_proj,mlp,moe]"
    note = line(planned_with("+recipe=deepseek_v3", whole)[0], "exchanged_again")
    assert "6 times a layer" in note.equation and note.equation.endswith("which fits")
    tight = line(planned_with("+recipe=kimi_k2")[0], "exchanged_again")
    assert tight.equation.endswith("more than a device has")
    assert line(planned_with("+recipe=deepseek_v3")[0], "exchanged_again") is None


def test_what_does_not_fit_is_offered_experts_again_before_whole_layers():
    less = ("train.recompute_granularity=null", "train.recompute_modules=null", "launch.device_memory=46GiB")
    _, problems = planned_with("+recipe=qwen3_30b_a3b", *less)
    (problem,) = problems
    assert problem.code == "PP-E801"
    assert "train.recompute_modules=[experts]" in problem.remedy.splitlines()[0].replace("'", "")
