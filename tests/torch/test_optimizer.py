"""AdamW's groups, the learning rate, and state that is known by canonical name."""

import math

import pytest
import torch
from cuts import cut, tiny
from torch import nn

from ppctl.config.schema import OptimConfig
from ppctl.geometry.names import stage_parameters
from ppctl.model.stage import build_stage
from ppctl.train.optimizer import build_optimizer, lr_at, set_lr, state_by_name


def masters(layout="EttttL", stage=0, **changes):
    model = tiny(**changes)
    spec = cut(layout, 1)[stage]
    return build_stage(spec, model, seed=5, dtype=torch.float32, device="cpu").canonical_parameters(), model


def rows(model):
    return stage_parameters(model, cut("EttttL", 1)[0].layers)


@pytest.mark.parametrize(
    ("changes", "spared"),
    [
        ({}, {"tok_embeddings.weight"}),
        ({"share_embeddings_and_output_weights": True}, {"tok_embeddings.weight", "output.weight"}),
        ({"add_qkv_bias": True, "qk_layernorm": True}, {"tok_embeddings.weight"}),
    ],
)
def test_matrices_decay_and_norms_biases_and_embeddings_do_not(changes, spared):
    own, model = masters(**changes)
    optimizer = build_optimizer(own, OptimConfig(weight_decay=0.3), rows(model))
    decay = {id(p): group.weight_decay for group in optimizer.groups for p in group.parameters}
    assert len(decay) == len(own)
    for name, parameter in own.items():
        exempt = name in spared or name.endswith(".bias") or "norm" in name
        assert decay[id(parameter)] == (0.0 if exempt else 0.3), name


OPTIM = OptimConfig(lr=1.0, min_lr=0.2, warmup_steps=4)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.25),
        (1, 0.5),
        (3, 1.0),
        (4, 1.0),
        (6, 0.2 + 0.4 * (1 + math.cos(math.pi / 4))),
        (8, 0.6),
        (11, 0.2 + 0.4 * (1 + math.cos(7 * math.pi / 8))),
        (12, 0.2),
        (500, 0.2),
    ],
)
def test_the_rate_warms_up_and_then_follows_half_a_cosine(step, expected):
    assert lr_at(step, OPTIM, 12) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 1), (0, 7), (1, 1), (3, 3), (5, 3), (3, 4)])
def test_no_step_of_a_run_is_lost_at_rate_zero_and_the_rate_never_exceeds_lr(warmup, steps):
    optim = OptimConfig(lr=0.1, min_lr=0.0, warmup_steps=warmup)
    assert all(0 < lr_at(step, optim, steps) <= 0.1 for step in range(steps))


def step_once(own, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in own.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def test_steps_equal_those_of_torchs_own_optimizer_made_from_scratch():
    own, model = masters()
    twin, _ = masters()
    optim = OptimConfig(lr=1e-2, weight_decay=0.1)
    ours = build_optimizer(own, optim, rows(model))
    decayed = [p for n, p in twin.items() if p.dim() > 1 and n != "tok_embeddings.weight"]
    rest = [p for n, p in twin.items() if not (p.dim() > 1 and n != "tok_embeddings.weight")]
    theirs = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=0.0, betas=(0.9, 0.95)
    )
    for step in range(3):
        lr = lr_at(step, optim, 3)
        set_lr(ours, lr)
        for group in theirs.param_groups:
            group["lr"] = lr
        step_once(own, ours, step)
        step_once(twin, theirs, step)
    for name in own:
        assert torch.equal(own[name], twin[name]), name


def test_state_moves_by_name_into_another_cut_and_training_continues_bitwise():
    whole, model = masters()
    optim = OptimConfig(lr=1e-2)
    optimizer = build_optimizer(whole, optim, rows(model))
    for seed in range(2):
        step_once(whole, optimizer, seed)
    saved = {n: {k: t.clone() for k, t in s.items()} for n, s in state_by_name(optimizer, whole).items()}
    assert {key for state in saved.values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}

    part, _ = masters("Ett|ttL", stage=1)
    resumed = build_optimizer(part, optim, rows(model))
    with torch.no_grad():
        for name, parameter in part.items():
            parameter.copy_(whole[name])
            for key, tensor in state_by_name(resumed, part)[name].items():
                tensor.copy_(saved[name][key])
    gradients = {name: torch.randn_like(p) for name, p in whole.items()}
    for own, opt in ((whole, optimizer), (part, resumed)):
        for name, parameter in own.items():
            parameter.grad = gradients[name]
        opt.step()
    for name in part:
        assert torch.equal(part[name], whole[name]), name
    assert state_by_name(resumed, part)["norm.weight"]["step"].item() == 3


def test_a_checkpoint_can_be_read_into_the_state_in_place_before_the_first_step():
    own, model = masters()
    optimizer = build_optimizer(own, OptimConfig(), rows(model))
    state_by_name(optimizer, own)["norm.weight"]["exp_avg"].fill_(7)
    assert optimizer.state[own["norm.weight"]]["exp_avg"].eq(7).all()
    step_once(own, optimizer, 0)
    assert optimizer.state[own["norm.weight"]]["exp_avg"].mean() > 5


def test_a_rank_without_parameters_has_an_optimizer_whose_step_does_nothing():
    optimizer = build_optimizer({}, OptimConfig(), rows(tiny()))
    set_lr(optimizer, 0.5)
    optimizer.step()
    assert state_by_name(optimizer, {}) == {}


def test_a_lone_vector_is_spared():
    own = {"norm.weight": nn.Parameter(torch.ones(3))}
    optimizer = build_optimizer(own, OptimConfig(lr=1.0, weight_decay=0.5), rows(tiny()))
    own["norm.weight"].grad = torch.zeros(3)
    optimizer.step()
    assert torch.equal(own["norm.weight"], torch.ones(3))
