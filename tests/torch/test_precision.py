"""bfloat16 computes, float32 remembers: accumulation and steps lose nothing that float32 keeps."""

import pytest
import torch
from cuts import cut, tiny

from ppctl.config.schema import OptimConfig
from ppctl.model.loss import microbatch_loss
from ppctl.model.stage import build_stage
from ppctl.train.optimizer import build_optimizer
from ppctl.train.precision import Weights


def stage_of(dtype):
    return build_stage(cut("EttttL", 1)[0], tiny(), seed=5, dtype=dtype, device="cpu")


def backward(stage, microbatches, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(microbatches):
        tokens, labels = torch.randint(52, (2, 2, 7), generator=generator)
        microbatch_loss(stage(tokens)[0], labels, torch.ones(2, 7), 14 * microbatches).backward()


def test_float32_weights_are_their_own_masters():
    stage = stage_of(torch.float32)
    weights = Weights(stage.canonical_parameters())
    assert all(weights.master[name] is parameter for name, parameter in stage.canonical_parameters().items())
    backward(stage, 2)
    assert all(weights.gradients()[name] is p.grad for name, p in stage.canonical_parameters().items())
    before = stage.norm.weight.detach().clone()
    weights.publish()
    assert torch.equal(stage.norm.weight, before)


def test_bfloat16_gradients_add_up_in_float32_in_microbatch_order():
    stage = stage_of(torch.bfloat16)
    weights = Weights(stage.canonical_parameters())
    seen = {name: [] for name in weights.model}
    for name, parameter in weights.model.items():  # runs after the accumulation took the gradient away
        parameter.register_hook(lambda gradient, name=name: seen[name].append(gradient.clone()))
    backward(stage, 5)
    for name, parameter in weights.model.items():
        assert parameter.grad is None, name
        expected = torch.zeros(parameter.shape)
        for gradient in seen[name]:
            assert gradient.dtype == torch.bfloat16
            expected += gradient.float()
        assert len(seen[name]) == 5
        assert weights.gradients()[name].dtype == torch.float32
        assert torch.equal(weights.gradients()[name], expected), name


def test_small_gradients_survive_where_bfloat16_would_round_them_away():
    stage = stage_of(torch.bfloat16)
    weights = Weights(stage.canonical_parameters())
    parameter = stage.norm.weight
    for size in (1.0, *[2.0**-10] * 8):
        (parameter * size).sum().backward()
    assert torch.equal(weights.gradients()["norm.weight"], torch.full((24,), 1 + 2.0**-7))


def test_small_steps_survive_in_the_master_and_reach_the_model_when_they_add_up():
    stage = stage_of(torch.bfloat16)
    weights = Weights({"norm.weight": stage.norm.weight})
    moved = []
    for _ in range(8):
        weights.master["norm.weight"].data.sub_(2.0**-10)
        weights.publish()
        moved.append(stage.norm.weight[0].item())
    assert moved[0] == 1.0
    assert moved[-1] == 1 - 2.0**-7
    assert weights.master["norm.weight"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_every_parameter_and_clearing_forgets_every_gradient(dtype):
    stage = stage_of(dtype)
    weights = Weights(stage.canonical_parameters())
    before = {name: p.detach().clone() for name, p in weights.model.items()}
    optimizer = build_optimizer(weights.master, OptimConfig(lr=1e-2), stage.parameter_rows())
    backward(stage, 1)
    optimizer.step()
    weights.publish()
    weights.clear_gradients()
    assert weights.gradients() == {}
    assert all(p.grad is None for p in weights.model.values())
    for name, parameter in weights.model.items():
        assert not torch.equal(parameter, before[name]), name
        assert torch.equal(parameter, weights.master[name].to(dtype)), name


def test_bfloat16_training_follows_float32_training():
    runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        stage = stage_of(dtype)
        weights = Weights(stage.canonical_parameters())
        optimizer = build_optimizer(weights.master, OptimConfig(lr=3e-3), stage.parameter_rows())
        losses = []
        for _ in range(30):
            weights.clear_gradients()
            backward(stage, 1)
            optimizer.step()
            weights.publish()
            with torch.no_grad():
                tokens, labels = torch.randint(52, (2, 2, 7), generator=torch.Generator().manual_seed(0))
                losses.append(microbatch_loss(stage(tokens)[0], labels, torch.ones(2, 7), 14).item())
        runs[dtype] = losses
    full, half = runs[torch.float32], runs[torch.bfloat16]
    assert full[-1] < full[0] / 2
    assert half[-1] == pytest.approx(full[-1], rel=0.05)
