"""Training in which products add weights' gradients to their float32 sums, as on a GPU: the same bits in any cut."""

from dataclasses import replace

import pytest
from expert_runs import config_of, train_cut
from products_added import add_product_in_float32
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.train import rank_model
from ppctl.weight_gradients.wide_sums import WideSum


def train_added(mapping):
    """As `train_cut`, with sums of gradients as a GPU makes them."""
    choose = rank_model.choose_kernels
    rank_model.choose_kernels = lambda config, can: replace(choose(config, can), adds_gradients=True)
    WideSum.add_product = add_product_in_float32
    return train_cut(mapping)


def trained(text, train, layout, pp, schedule):
    config = config_of(text, "latent attention", 4, layout, pp)
    config.parallel.bf16, config.pipeline.pp_schedule = True, schedule
    ranks = run_ranks(train, pp, to_mapping(config))
    weights = {name: value for _, own in ranks for name, value in own.items()}
    return [(record["loss"], record["grad_norm"]) for record in ranks[0][0]], weights


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.whole), "zero_bubble"])
def test_two_cuts_give_the_same_bits_and_nearly_those_of_rounded_gradients(text, schedule):
    whole, weights = trained(text, train_added, "Et*5L", 1, "1f1b")
    cut, others = trained(text, train_added, "Et*2|t*3L", 2, schedule)
    assert cut == whole
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert (value == others[name]).all(), name
    rounded, _ = trained(text, train_cut, "Et*5L", 1, "1f1b")
    assert whole != rounded
    assert [loss for loss, _ in whole] == pytest.approx([loss for loss, _ in rounded], rel=2e-3)


def test_ranks_that_split_weights_add_products_of_all_tokens(text):
    losses = []
    for train in (train_added, train_cut):
        config = config_of(text, "dense, MTP", 4, "Et*5mL", 1)
        config.parallel.bf16, config.launch.gpus_per_node = True, 2
        config.parallel.tensor_model_parallel_size, config.parallel.sequence_parallel = 2, True
        records, _ = run_ranks(train, 2, to_mapping(config))[0]
        losses.append([record["loss"] for record in records])
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=2e-3)
