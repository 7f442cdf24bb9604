"""A cut model trains bitwise as the reference does: ties, norm, clipping and AdamW together, without the engine."""

import pytest
import torch
import torch.distributed as dist
from by_hand import train_by_hand
from cuts import random_batches, tiny
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.comm.groups import make_group
from ppctl.config.schema import OptimConfig
from ppctl.parallel.ties import TiedGradients, TiedUse

OPTIM = OptimConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2, clip_grad=0.5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("layout", "pp"),
    [
        pytest.param("EttttL", 1, id="one stage"),
        pytest.param("E|t|tt||t|L", 1, id="one rank, six stages"),
        pytest.param("Ett|ttL", 2, id="two ranks"),
        pytest.param("E|tt|tt|L", 2, id="E alone and L alone"),
        pytest.param("Et|tt|tL", 2, id="both uses on one rank"),
        pytest.param("E|tttt||L", 4, id="a rank without parameters"),
    ],
)
def test_losses_norms_and_weights_are_bitwise_those_of_the_reference(layout, pp, tied):
    model = tiny(share_embeddings_and_output_weights=tied)
    batches = random_batches(model, steps=4, microbatches=3)
    losses, norms, weights = train_reference(model, OPTIM, 11, batches)[:3]
    ranks = run_ranks(train_by_hand, pp, layout, pp, model, OPTIM, 11, batches)
    assert [sum(by_rank) for by_rank in zip(*(r[0] for r in ranks), strict=True)] == losses
    assert all(r[1] == norms for r in ranks)
    got = {name: weight for r in ranks for name, weight in r[2].items()}
    assert got.keys() == weights.keys()
    for name in weights:
        assert torch.equal(got[name], weights[name]), name
    if tied:
        assert torch.equal(got["output.weight"], got["tok_embeddings.weight"])


def sum_uses(uses):
    """Each use's gradient is a vector whose sum depends on the order of its terms; returns the sums held here."""
    rank = dist.get_rank()
    masters = {}
    for i, (holder, name) in enumerate(uses):
        if holder == rank:
            masters[name] = torch.nn.Parameter(torch.zeros(1000))
            masters[name].grad = gradient_of(i)
    ties = TiedGradients([TiedUse(*use) for use in uses], masters, rank)
    ties.sum()
    return {name: p.grad for name, p in masters.items()}


def gradient_of(use):
    return torch.randn(1000, generator=torch.Generator().manual_seed(use)) * 10.0 ** (3 - use)


@pytest.mark.parametrize(
    "uses",
    [
        pytest.param([(0, "a"), (2, "b"), (1, "c")], id="three ranks"),
        pytest.param([(0, "a"), (1, "b"), (1, "c")], id="two of three on the last rank"),
        pytest.param([(1, "a"), (0, "b"), (1, "c")], id="the middle one elsewhere"),
        pytest.param([(2, "a"), (2, "b"), (2, "c")], id="all on one rank"),
    ],
)
def test_three_uses_are_summed_in_their_order_wherever_they_live(uses):
    expected = (gradient_of(0) + gradient_of(1)) + gradient_of(2)
    assert not torch.equal(expected, gradient_of(0) + (gradient_of(1) + gradient_of(2)))
    sums = {name: total for rank in run_ranks(sum_uses, 3, uses) for name, total in rank.items()}
    assert set(sums) == {"a", "b", "c"}
    for name, total in sums.items():
        assert torch.equal(total, expected), name


@pytest.mark.parametrize("layout", ["Ett|ttL", "Et|tt|tL"], ids=["two ranks", "one rank"])
def test_uses_are_still_bit_equal_after_twenty_steps(layout):
    model = tiny(share_embeddings_and_output_weights=True)
    ranks = run_ranks(train_by_hand, 2, layout, 2, model, OPTIM, 2, random_batches(model, 20, 1))
    weights = {name: weight for rank in ranks for name, weight in rank[2].items()}
    assert torch.equal(weights["output.weight"], weights["tok_embeddings.weight"])


def sum_and_meet(uses):
    """Sums of several shared parameters one after another, and then a number of every rank, in a group of them all."""
    first, second = ([TiedUse(*use) for use in each] for each in uses)
    rank = dist.get_rank()
    for each in (first, second):
        masters = {use.name: torch.nn.Parameter(torch.zeros(3)) for use in each if use.rank == rank}
        for parameter in masters.values():
            parameter.grad = torch.full((3,), float(rank))
        TiedGradients(each, masters, rank).sum()
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, rank, group=make_group([tuple(range(dist.get_world_size()))]))
    return found


def test_ranks_without_a_shared_parameter_find_the_others_in_the_groups_made_behind_it():
    """As the group of saves is, in every run with a tied model on three ranks and more."""
    uses = [[(0, "a"), (2, "b")], [(1, "c"), (2, "d")]]
    assert run_ranks(sum_and_meet, 3, uses, timeout=60) == [[0, 1, 2]] * 3
