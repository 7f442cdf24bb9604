"""The norm over pp ranks is bitwise that of one process, on every rank, also on one without parameters."""

import pytest
import torch
import torch.distributed as dist
from cuts import cut, tiny
from ranks import run_ranks

from ppctl.model.stage import build_stage
from ppctl.train.grad_norm import GradientNorm, clip_gradients, locate_parameters


def gradients(specs, model):
    own = {}
    for spec in specs:
        own |= build_stage(spec, model, seed=5, dtype=torch.float32, device="cpu").canonical_parameters()
    for name, parameter in own.items():
        seed = sum(name.encode())
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * (seed % 97)
    if "output.weight" in own and model.share_embeddings_and_output_weights:
        seed = sum(b"tok_embeddings.weight")
        shape = own["output.weight"].shape
        own["output.weight"].grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (seed % 97)
    return own


def measure(layout, model, bad):
    specs = cut(layout, dist.get_world_size())
    own = gradients([spec for spec in specs if spec.pp_rank == dist.get_rank()], model)
    if bad in own:
        own[bad].grad.view(-1)[0] = float("nan")
    norm = GradientNorm(locate_parameters(specs, model), device="cpu", group=dist.group.WORLD).measure(own)
    clip_gradients(own, norm, 1.0)
    return norm.total.item(), {name: p.grad for name, p in own.items()}, norm.culprits()


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("layout", "pp"), [("Ett|ttL", 2), ("Et|t|t|tL", 2), ("E|tttt||L", 4), ("E||||||tttt|L", 4), ("E|t|t|t|t|L", 3)]
)
def test_norm_and_clipped_gradients_are_bitwise_those_of_one_process(layout, pp, tied):
    model = tiny(share_embeddings_and_output_weights=tied)
    whole = gradients(cut("EttttL", 1), model)
    once = [p for name, p in whole.items() if not (tied and name == "output.weight")]
    total = torch.nn.utils.get_total_norm([p.grad for p in once])
    torch.nn.utils.clip_grads_with_norm_(whole.values(), 1.0, total)
    ranks = run_ranks(measure, pp, layout, model, None)
    assert [norm for norm, _, _ in ranks] == [total.item()] * pp
    got = {name: gradient for _, own, _ in ranks for name, gradient in own.items()}
    assert got.keys() == whole.keys()
    for name, parameter in whole.items():
        assert torch.equal(got[name], parameter.grad), name


def test_every_rank_names_the_parameter_that_is_not_finite():
    answers = run_ranks(measure, 2, "Et|t|t|tL", tiny(), "layers.1.ffn_norm.weight")
    assert [culprits for _, _, culprits in answers] == [(("layers.1.ffn_norm.weight", 1, 1),)] * 2
