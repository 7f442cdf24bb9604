"""Training with products in 8 bits, emulated: the same bits in any cut, and what bfloat16 learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from expert_runs import config_of, train_cut
from groups_in_float32 import multiply_groups_in_float32
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.train import rank_model

SIZES = {
    "hidden_size": 32, "ffn_hidden_size": 48, "moe_ffn_hidden_size": 16, "moe_shared_expert_intermediate_size": 32,
}  # fmt: skip


def trained(text, kind, layout, pp, **model):
    """(Losses and norms, all weights) of STEPS steps."""
    config = config_of(text, kind, 4, layout, pp)
    sizes = {name: size for name, size in SIZES.items() if getattr(config.model, name) is not None}
    config.model, config.parallel.bf16 = replace(config.model, **sizes, **model), True
    ranks = run_ranks(train_cut, pp, to_mapping(config))
    weights = {name: value for _, own in ranks for name, value in own.items()}
    return [(record["loss"], record["grad_norm"]) for record in ranks[0][0]], weights


@pytest.mark.parametrize(
    ("kind", "fp8", "recipe"),
    [
        ("dense, MTP", "hybrid", "rowwise"),
        pytest.param("deepseek", "e4m3", "blockwise", marks=pytest.mark.whole),
    ],
)
def test_two_cuts_give_the_same_bits_and_learn_what_bfloat16_does(text, kind, fp8, recipe):
    whole, weights = trained(text, kind, "Et*5mL", 1, fp8=fp8, fp8_recipe=recipe)
    cut, others = trained(text, kind, "Et|t*2|t|tmL", 2, fp8=fp8, fp8_recipe=recipe)
    assert cut == whole
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert (value == others[name]).all(), name
    plain, _ = trained(text, kind, "Et*5mL", 1)
    assert whole != plain and whole[-1][0] < whole[0][0] - 0.2
    assert [loss for loss, _ in whole] == pytest.approx([loss for loss, _ in plain], rel=0.01)


@pytest.mark.whole
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_divided_weights_in_8_bits_learn_what_whole_ones_do(text, recipe):
    """Without sequence parallelism: sums over ranks are made in the memory of products."""
    found = []
    for tp in (1, 2):
        config = config_of(text, "dense, MTP", 4, "Et*5mL", 1)
        config.model, config.parallel.bf16 = replace(config.model, **SIZES, fp8="e4m3", fp8_recipe=recipe), True
        config.parallel.tensor_model_parallel_size = config.launch.gpus_per_node = tp
        records, _ = run_ranks(train_cut, tp, to_mapping(config))[0]
        found.append([record["loss"] for record in records])
    assert found[1] == pytest.approx(found[0], rel=0.01)


def train_at_once(mapping):
    """As `train_cut`, with all experts at once, as a GPU has them."""
    choose = rank_model.choose_kernels

    def chosen(config, can):
        kernels = choose(config, can)
        return replace(
            kernels, groups_experts=True, fp8=replace(kernels.fp8, multiply_groups=multiply_groups_in_float32)
        )

    rank_model.choose_kernels = chosen
    return train_cut(mapping)


@pytest.mark.parametrize("sharding", ["full", pytest.param("optimizer_gradients", marks=pytest.mark.whole)])
def test_copies_of_experts_in_8_bits_are_those_of_the_weights_at_hand(text, sharding):
    """In every step, also if a stage's weights are gathered anew."""
    found = []
    for train, how in ((train_cut, "none"), (train_at_once, "none"), (train_at_once, sharding)):
        config = config_of(text, "softmax", 2, "Et*5L", 1, dp=2)
        sizes = {name: size for name, size in SIZES.items() if getattr(config.model, name) is not None}
        config.model, config.parallel.bf16 = replace(config.model, **sizes, fp8="e4m3"), True
        config.parallel.data_parallel_sharding, config.optim.clip_grad = how, 0.0  # a norm is summed in another order
        records, _ = run_ranks(train, 2, to_mapping(config))[0]
        found.append([record["loss"] for record in records])
    one_by_one, at_once, sharded = found
    assert sharded == at_once
    assert at_once == pytest.approx(one_by_one, rel=1e-4)
