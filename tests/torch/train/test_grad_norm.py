"""The norm and clipping on one process are torch's own, bit for bit, and a bad gradient is named."""

import pytest
import torch
from cuts import cut, tiny

from ppctl.model.stage import build_stage
from ppctl.train.grad_norm import GradientNorm, clip_gradients, locate_parameters

CUTS = ["EttttL", "Ett|ttL", "E|t|tt||t|L"]


def parameters(layout, model):
    stages = [build_stage(spec, model, seed=5, dtype=torch.float32, device="cpu") for spec in cut(layout, 1)]
    own = {name: p for stage in stages for name, p in stage.canonical_parameters().items()}
    for i, parameter in enumerate(own.values()):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(i)) * 10.0 ** (i % 5 - 3)
    return own


@pytest.mark.parametrize("layout", CUTS)
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_norm_and_clipped_gradients_are_bitwise_those_of_clip_grad_norm(layout, max_norm):
    model = tiny()
    ours, theirs = parameters(layout, model), parameters("EttttL", model)
    norm = GradientNorm(locate_parameters(cut(layout, 1), model), device="cpu").measure(ours)
    clip_gradients(ours, norm, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs.values(), max_norm)
    assert norm.total.item() == expected.item() > 0.5
    for name in theirs:
        assert torch.equal(ours[name].grad, theirs[name].grad), name


def test_a_tied_parameter_counts_once_and_all_its_uses_are_clipped():
    model = tiny(share_embeddings_and_output_weights=True)
    own = parameters("EttttL", model)
    own["tok_embeddings.weight"].grad *= 1e4  # else the others hide how often it counts
    own["output.weight"].grad = own["tok_embeddings.weight"].grad.clone()
    once = [p.grad for name, p in own.items() if name != "output.weight"]
    expected = torch.nn.utils.get_total_norm(once)
    norm = GradientNorm(locate_parameters(cut("EttttL", 1), model), device="cpu").measure(own)
    assert torch.equal(norm.total, expected)
    clip_gradients(own, norm, 0.5)
    assert torch.equal(own["output.weight"].grad, own["tok_embeddings.weight"].grad)
    assert torch.nn.utils.get_total_norm(once).item() == pytest.approx(0.5, rel=1e-5)


def test_clip_0_leaves_gradients_alone():
    model = tiny()
    own = parameters("EttttL", model)
    before = {name: p.grad.clone() for name, p in own.items()}
    clip_gradients(own, GradientNorm(locate_parameters(cut("EttttL", 1), model), device="cpu").measure(own), 0.0)
    assert all(torch.equal(own[name].grad, before[name]) for name in own)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_parameters_that_are_not_finite_are_named_with_their_stage_and_pp_rank(bad):
    model = tiny()
    own = parameters("Et|t|t|tL", model)
    norms = GradientNorm(locate_parameters(cut("Et|t|t|tL", 2), model), device="cpu")
    assert norms.measure(own).culprits() == ()
    own["layers.2.feed_forward.w3.weight"].grad[3, 1] = bad
    own["norm.weight"].grad[0] = bad
    norm = norms.measure(own)
    assert not torch.isfinite(norm.total)
    assert norm.culprits() == (("layers.2.feed_forward.w3.weight", 2, 0), ("norm.weight", 3, 1))


def test_a_parameter_without_a_gradient_counts_as_nothing():
    model = tiny()
    own = parameters("EttttL", model)
    own["layers.1.attention.wo.weight"].grad = None
    norm = GradientNorm(locate_parameters(cut("EttttL", 1), model), device="cpu").measure(own)
    assert norm.total.item() == pytest.approx(
        torch.nn.utils.get_total_norm([p.grad for p in own.values() if p.grad is not None]).item(), rel=1e-6
    )


def test_what_the_norms_are_indexed_with_is_on_the_device():
    # Indices on the host would make it wait for the device, in every step.
    locations = locate_parameters(cut("EttttL", 1), tiny())
    norm = GradientNorm(locations, device="meta", parts=[({locations[2].name}, None)])
    ((places, _),) = norm.parts
    assert places.is_meta
    assert places.shape == (1,)
    assert norm.places.is_meta
