"""On how many parts of the experts a token's lie, and in which runs they are summed."""

import itertools

import pytest

from ppctl.config.schema import ModelConfig
from ppctl.geometry.expert_reach import expert_runs, reached


def model(experts=8, topk=2, groups=None, kept=None):
    limits = dict(moe_router_num_groups=groups, moe_router_group_topk=kept)
    return ModelConfig(num_moe_experts=experts, moe_router_topk=topk, **limits)


@pytest.mark.parametrize(("experts", "topk", "parts"), [(8, 2, 4), (8, 3, 2), (6, 2, 6), (8, 8, 4), (12, 4, 3)])
def test_the_expected_number_of_parts_is_that_of_all_choices(experts, topk, parts):
    choices = list(itertools.combinations(range(experts), topk))
    size = experts // parts
    mean = sum(len({expert // size for expert in choice}) for choice in choices) / len(choices)
    assert reached(model(experts, topk), parts) == pytest.approx(mean, rel=1e-12)


def test_a_limited_router_reaches_no_more_than_its_groups():
    deepseek = model(256, 8, 8, 4)
    assert reached(deepseek, 8) == 4
    assert reached(model(256, 8), 8) == pytest.approx(5.29, abs=0.01)


def test_runs_are_the_routers_groups_or_an_eighth():
    assert expert_runs(model(256, 8, 8, 4)) == (8, 32, 4)
    assert expert_runs(model(128, 8)) == (8, 16, 8)
    assert expert_runs(model(8, 2)) == (8, 1, 2)
    assert expert_runs(model(6, 2)) == (2, 3, 2)
