"""The bitwise law for what a layer may hold: experts with auxiliary losses and moving biases, and MTP anywhere."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from expert_runs import MODELS, STEPS, config_of, hold, hold_to_reference, reference_of, together, train_cut
from pairwise import in_tiers
from ranks import run_ranks

from ppctl.config.compose import compose
from ppctl.config.mapping import to_mapping


def layouts(kind: str) -> list[tuple[str, int]]:
    """Layouts and the pp they run on: E, m and L alone or beside others, empty stages, up to three chunks."""
    m = "m" * (MODELS[kind].get("mtp_num_layers") or 0)
    texts = [
        (f"Et*5{m}L", 1),
        (f"Et|t*4|{m}L", 1),
        (f"Et*3|t*2{m}L", 2),
        (f"Et*5|{m}L", 2),
        (f"E|t*2|t*3|{m}L", 2),
        (f"Et|t|t|t|t|{m}L", 2),
        (f"E|t|t*2|t*2|{m}|L", 3),
        (f"Et*2|t*3|{m}|L", 4),
        (f"E|t|t|t|t|t{m}||L", 4),
    ]
    return [(layout.replace("||L", "|L") if not m else layout, pp) for layout, pp in texts]


GRID = [
    (kind, layout, pp, m)
    for kind in MODELS
    for layout, pp in layouts(kind)
    for m in sorted({1, pp, 2 * pp + 1})
    if (layout.count("|") + 1) % pp == 0 and (layout.count("|") + 1 == pp or m >= pp)
]


@pytest.mark.shows("model.num_moe_experts", "model.mtp_num_layers")
@pytest.mark.parametrize(("kind", "layout", "pp", "m"), in_tiers(GRID, random.Random(3).sample(GRID, 8)))
def test_any_cut_of_a_model_with_experts_and_mtp_gives_the_same_bits(text, kind, layout, pp, m):
    hold_to_reference(text, kind, layout, pp, m)


@pytest.mark.parametrize(("kind", "layout", "pp"), [("softmax", "Et*2|t*3L", 2), ("deepseek", "Et|t*2|t*2|mL", 2)])
def test_several_schedule_calls_a_step_change_no_bit(text, kind, layout, pp):
    hold_to_reference(text, kind, layout, pp, m=4, calls=2)


@pytest.mark.whole
@pytest.mark.timeout(600)
def test_the_miniature_of_deepseek_v3_gives_the_bits_of_one_process(text):
    """16 ranks with two chunks each, latent attention, and all that the recipe switches on."""
    arguments = ["+recipe=deepseek_v3", "+scale=smoke", "launch.device=cpu", "parallel.bf16=false"]
    arguments += [f"data.path={text}", f"steps={STEPS}"]
    config = compose(arguments).config
    hold(config, reference_of(config), timeout=560.0)


PAIRED = [("Et*5mL", 1), ("Et*2|t*3|m|L", 2)]
"""Layouts, and pp: one rank a pipeline, and two ranks with two chunks each."""


def agree(a, b) -> bool:
    return abs(a - b).max() <= 1e-6 * abs(b).max()


@pytest.mark.shows("parallel.expert_model_parallel_size")
@pytest.mark.parametrize(
    ("kind", "layout", "pp", "dp", "ep"),
    [
        pytest.param("deepseek", "Et*5mL", 1, 4, 4, id="four ranks with two experts each"),
        pytest.param("softmax", "Et*5L", 1, 4, 2, id="two copies of every expert"),
        pytest.param("deepseek", "Et*2|t*3|m|L", 2, 2, 2, id="a pipeline with two chunks a rank"),
    ],
)
def test_experts_spread_over_ranks_agree_with_replicas_to_a_millionth(text, kind, layout, pp, dp, ep):
    """Only the order of sums differs; eps is 1e-4 on both sides, for the reason that the law of replicas gives."""
    spread, whole = (config_of(text, kind, 2 * pp, layout, pp, dp, size) for size in (ep, 1))
    for config in (spread, whole):
        config.optim.eps = 1e-4
    got, expected = (run_ranks(train_cut, pp * dp, to_mapping(config)) for config in (spread, whole))
    for (records, _), (wanted, _) in zip(got, expected, strict=True):
        for key in {"loss", "grad_norm", "mtp_loss", "aux_loss"} & wanted[0].keys():
            assert [r[key] for r in records] == pytest.approx([r[key] for r in wanted], rel=1e-6), key
    ours, theirs = together(got), together(expected)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert agree(value, theirs[name]), name


@pytest.mark.shows("parallel.overlap_moe_expert_parallel_comm", "parallel.delay_wgrad_compute")
@pytest.mark.parametrize(
    ("layout", "pp", "delayed", "recomputed"),
    in_tiers(
        [(*cut, *switches) for cut in PAIRED for switches in product((False, True), repeat=2)],
        [(*PAIRED[0], False, True), (*PAIRED[1], True, False)],
    ),
)
def test_exchanges_in_pairs_change_no_bit(text, layout, pp, delayed, recomputed):
    """Half of the experts on each of two ranks: every rank's forwards and backwards take turns at their exchanges.

    `delayed`: weight gradients are computed behind the pairs.
    """
    paired, alone = (config_of(text, "deepseek", 2 * pp, layout, pp, 2, 2) for _ in range(2))
    for config in (paired, alone):
        config.parallel.overlap_p2p_comm, config.parallel.batch_p2p_comm = True, False
        if recomputed:
            config.train.recompute_granularity, config.train.recompute_method = "full", "uniform"
    paired.parallel.overlap_moe_expert_parallel_comm, paired.parallel.delay_wgrad_compute = True, delayed
    got, expected = (run_ranks(train_cut, 2 * pp, to_mapping(config)) for config in (paired, alone))
    for (records, _), (wanted, _) in zip(got, expected, strict=True):
        for key in {"loss", "grad_norm", "mtp_loss", "aux_loss"} & wanted[0].keys():
            assert [r[key] for r in records] == [r[key] for r in wanted], key
    ours, theirs = together(got), together(expected)
    assert all(np.array_equal(value, theirs[name]) for name, value in ours.items()) and ours.keys() == theirs.keys()
