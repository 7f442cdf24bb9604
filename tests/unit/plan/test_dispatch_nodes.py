"""By how many nodes tokens are dispatched to their experts, and what the plan says of it."""

import itertools

import pytest

from ppctl.config.schema import ModelConfig, RunConfig
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
    assert "4 do not spread over 8 nodes" in dispatch_obstacle(halves, ParallelSizes(8, dp=8, ep=8))
    assert dispatch_nodes(halves, ParallelSizes(8, dp=8, ep=8)) == 1
