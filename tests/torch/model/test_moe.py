"""Experts against plain loops over tokens; routers against their formulas; auxiliary losses against adding them up."""

from functools import partial

import pytest
import torch
from cuts import tiny
from torch.utils.checkpoint import checkpoint

from ppctl.geometry.layers import parse_layers
from ppctl.geometry.rows import Parts, Place
from ppctl.model.feed_forward import Experts, MixtureOfExperts
from ppctl.model.initialize import initial_value
from ppctl.model.linear import grouped_product
from ppctl.model.router import balance_loss, within_best_groups
from ppctl.model.stage import build_stage, meta_stage
from ppctl.plan import StageSpec

SOFTMAX = dict(num_moe_experts=6, moe_router_topk=2, moe_ffn_hidden_size=10)
SIGMOID = dict(
    num_moe_experts=8,
    moe_router_topk=3,
    moe_ffn_hidden_size=10,
    moe_shared_expert_intermediate_size=14,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
)


def layer(changes, seed=5):
    """A mixture of experts with weights that differ, a bias that matters, and 2 x 7 tokens."""
    model = tiny(**changes)
    moe, generator = MixtureOfExperts(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(std=0.4, generator=generator)
        if moe.router.expert_bias is not None:
            moe.router.expert_bias.normal_(std=0.1, generator=generator)
    return moe, torch.randn(2, 7, model.hidden_size, generator=generator), model


def swiglu(x, w1, w2, w3):
    return w2 @ (torch.nn.functional.silu(w1 @ x) * (w3 @ x))


def one_token(moe, x, model):
    """What the layer makes of one token [h], in float64, expert by expert."""
    logits = moe.router.weight.double() @ x
    scores = logits.sigmoid() if model.moe_router_score_function == "sigmoid" else logits.softmax(0)
    wanted = scores.clone()
    if moe.router.expert_bias is not None:
        wanted += moe.router.expert_bias.double()
    groups = model.moe_router_num_groups
    if groups:
        size = len(wanted) // groups
        strength = [sum(sorted(wanted[g * size : (g + 1) * size].tolist())[-2:]) for g in range(groups)]
        best = sorted(range(groups), key=lambda g: -strength[g])[: model.moe_router_group_topk]
        for expert in range(len(wanted)):
            if expert // size not in best:
                wanted[expert] = -torch.inf
    chosen = sorted(range(len(wanted)), key=lambda e: -wanted[e].item())[: model.moe_router_topk]
    weights = scores[chosen]
    if not (model.moe_router_score_function == "softmax" and model.moe_router_pre_softmax):
        weights = weights / weights.sum()
    weights = weights * (model.moe_router_topk_scaling_factor or 1)
    stacks = [getattr(moe.experts, name).double() for name in ("w1", "w2", "w3")]
    out = sum(weight * swiglu(x, *(stack[e] for stack in stacks)) for weight, e in zip(weights, chosen, strict=True))
    if moe.shared_experts is not None:
        out = out + swiglu(x, *(getattr(moe.shared_experts, n).weight.double() for n in ("w1", "w2", "w3")))
    return out


@pytest.mark.parametrize(
    "changes",
    [SOFTMAX, SOFTMAX | dict(moe_router_pre_softmax=True), SIGMOID],
    ids=["softmax", "shares of all", "sigmoid"],
)
def test_outputs_and_gradients_are_those_of_a_loop_over_tokens_and_experts(changes):
    moe, x, model = layer(changes)
    x.requires_grad_()
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    out = moe(x)
    ours = torch.autograd.grad((out * direction).sum(), [x, *moe.parameters()])
    expected = torch.stack([one_token(moe, token, model) for token in x.flatten(0, 1).double()]).view_as(x)
    theirs = torch.autograd.grad((expected * direction).sum(), [x, *moe.parameters()])
    for a, b in [(out, expected), *zip(ours, theirs, strict=True)]:
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_the_bias_decides_who_is_chosen_and_not_with_which_weight():
    moe, x, model = layer(SIGMOID | dict(moe_router_num_groups=None, moe_router_group_topk=None))
    moe.router.expert_bias = torch.tensor([9.0, 9, 9, 0, 0, 0, 0, 0])
    routing = moe.router(x)
    assert routing.experts.sort(-1).values.flatten(0, 1).unique(dim=0).tolist() == [[0, 1, 2]]
    assert routing.weights.sum(-1).allclose(torch.tensor(model.moe_router_topk_scaling_factor))
    assert not moe.router.expert_bias.requires_grad


def test_only_the_best_groups_by_their_two_best_are_left():
    scores = torch.tensor([[0.9, 0.0, 0.5, 0.5, 0.6, 0.2]])
    assert within_best_groups(scores, 3, 1).tolist() == [[-torch.inf, -torch.inf, 0.5, 0.5, -torch.inf, -torch.inf]]
    assert within_best_groups(scores, 3, 2)[0, :4].tolist() == scores[0, :4].tolist()


def test_a_balanced_router_has_a_balance_loss_of_one_and_a_one_sided_one_more():
    even = torch.eye(4).repeat(3, 1)[None]
    assert balance_loss(even, 1).item() == pytest.approx(1.0)
    assert balance_loss(torch.eye(4)[:1].repeat(12, 1)[None], 1).item() == pytest.approx(4.0)
    assert balance_loss(torch.cat((even, torch.eye(4)[:1].repeat(12, 1)[None])), 1).item() == pytest.approx(2.5)


AUXILIARY = {
    "over the microbatch": SOFTMAX | dict(moe_aux_loss_coeff=0.3),
    "by sequence": SIGMOID | dict(moe_aux_loss_coeff=0.3, moe_router_load_balancing_type="seq_aux_loss"),
    "z-loss": SOFTMAX | dict(moe_z_loss_coeff=0.3),
    "both": SIGMOID | dict(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.2),
}


def auxiliary_of(moe, x, model):
    """The auxiliary losses written out."""
    logits = x @ moe.router.weight.T
    total = (model.moe_z_loss_coeff or 0) * logits.exp().sum(-1).log().square().mean()
    scores = logits.sigmoid() if model.moe_router_score_function == "sigmoid" else logits.softmax(-1)
    scores = scores / scores.sum(-1, keepdim=True)
    parts = list(scores) if model.moe_router_load_balancing_type == "seq_aux_loss" else [scores.flatten(0, 1)]
    experts, k = scores.shape[-1], model.moe_router_topk
    for part in parts:
        load = torch.stack([(part.topk(k, -1).indices == e).sum() for e in range(experts)]) / (k * len(part))
        total = total + model.moe_aux_loss_coeff * experts * (load * part.mean(0)).sum() / len(parts)
    return total


@pytest.mark.parametrize("changes", AUXILIARY.values(), ids=AUXILIARY)
def test_an_auxiliary_loss_rides_on_the_output_as_if_it_were_added_to_the_objective(changes):
    moe, x, model = layer(changes)
    plain, _, _ = layer(changes | dict(moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None))
    moe.router.ledger.scale = 0.25
    moe(x).square().sum().backward()
    extra = auxiliary_of(plain, x, model)
    (plain(x).square().sum() + 0.25 * extra).backward()
    assert sum(moe.router.ledger.losses).item() == pytest.approx(extra.item(), rel=1e-5)
    for (name, a), b in zip(moe.named_parameters(), plain.parameters(), strict=True):
        assert (a.grad - b.grad).abs().max() <= 1e-5 * b.grad.abs().max(), name


def test_the_ledger_counts_every_token_once_in_training_and_never_elsewhere():
    moe, x, model = layer(AUXILIARY["both"])
    with torch.no_grad():
        moe(x)
    assert moe.router.ledger.losses == [] and not moe.router.counts_of_step().any()
    for _ in range(2):
        checkpoint(moe, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert len(moe.router.ledger.losses) == 2
    assert moe.router.counts_of_step().sum().item() == 2 * 14 * model.moe_router_topk


def test_grouped_products_are_those_of_the_loop():
    experts = Experts(tiny(**SOFTMAX | dict(hidden_size=16, moe_ffn_hidden_size=32))).bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    counts = torch.tensor([3, 0, 5, 1, 0, 2])
    rows = torch.randn(11, 16, dtype=torch.bfloat16)
    in_one_kernel = partial(grouped_product, ends=counts.cumsum(0, dtype=torch.int32))
    weights = torch.rand(11, 1).bfloat16()
    grouped = experts.transform(in_one_kernel, rows, weights, experts.w1, experts.w2, experts.w3)
    assert torch.allclose(grouped, experts(rows, weights, counts), atol=1e-2)


def test_experts_start_as_their_own_names_say_whoever_holds_them():
    model, spec = tiny(**SIGMOID), StageSpec(0, 0, 0, parse_layers(["decoder.1"]), (), (), 0, 0, 0)
    options = dict(seed=3, dtype=torch.float32, device="cpu")
    whole = build_stage(spec, model, **options).canonical_parameters()
    for name in ("w1", "w2", "w3"):
        stack = f"layers.1.moe.experts.{name}"
        shares = [build_stage(spec, model, **options, parts=Parts(ep=Place(rank, 4))) for rank in range(4)]
        parts = [share.canonical_parameters()[stack] for share in shares]
        assert torch.equal(torch.cat(parts), whole[stack])
        alone = f"layers.1.moe.experts.5.{name}.weight"
        assert torch.equal(whole[stack][5], initial_value(alone, model, 3))


def test_weights_in_bfloat16_leave_the_bias_in_float32():
    spec = StageSpec(0, 0, 0, parse_layers(["decoder.1"]), (), (), 0, 0, 0)
    stage = build_stage(spec, tiny(**SIGMOID), seed=3, dtype=torch.bfloat16, device="cpu")
    assert {b.dtype for b in stage.canonical_buffers().values()} == {torch.float32}
    assert list(meta_stage(spec.layers, tiny(**SIGMOID)).canonical_buffers()) == ["layers.1.moe.router.expert_bias"]
