"""Every sum over ranks is needed: without it a loss, a gradient, the norm or a weight is wrong, and tests see it."""

from functools import cache

import pytest
from axis_mutants import MUTANTS, train_mutants
from axis_runs import config_of, differences, world_of
from ranks import run_ranks

from ppctl.config.mapping import to_mapping

SAMPLE = ["gradients of norms over tp", "embeddings", "norms over tp"]
"""What `make test-all` runs; the rest is for the soak."""


@cache
def results(world, sample):
    configs = {name: config_of(kind, **axes) for name, (_, kind, axes) in MUTANTS.items() if (name in SAMPLE) == sample}
    chosen = {name: to_mapping(config) for name, config in configs.items() if world_of(config) == world}
    ranks = run_ranks(train_mutants, world, list(chosen.items()), timeout=460)
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(chosen)}


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.whole if name in SAMPLE else pytest.mark.soak) for name in MUTANTS]
)
def test_a_sum_that_is_left_out_is_noticed(name):
    _, kind, axes = MUTANTS[name]
    far = differences(kind, results(world_of(config_of(kind, **axes)), name in SAMPLE)[name])
    assert any(not value <= 1e-9 for value in far.values())
