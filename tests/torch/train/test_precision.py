"""bfloat16 computes, float32 remembers: accumulation and steps lose nothing that float32 keeps."""

import pytest
import torch
from accumulated import accumulated
from cuts import cut, tiny
from oracle.reference import whole_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ppctl.config.schema import OptimConfig
from ppctl.model.loss import microbatch_loss
from ppctl.model.stage import build_stage
from ppctl.train.optimizer import AdamW
from ppctl.train.trained_weights import Weights


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
    assert all(accumulated(weights)[name] is p.grad for name, p in stage.canonical_parameters().items())
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
        assert accumulated(weights)[name].dtype == torch.float32
        assert torch.equal(accumulated(weights)[name], expected), name


def test_small_gradients_survive_where_bfloat16_would_round_them_away():
    stage = stage_of(torch.bfloat16)
    weights = Weights(stage.canonical_parameters())
    parameter = stage.norm.weight
    for size in (1.0, *[2.0**-10] * 8):
        (parameter * size).sum().backward()
    assert torch.equal(accumulated(weights)["norm.weight"], torch.full((24,), 1 + 2.0**-7))


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
    optimizer = AdamW(weights.master, OptimConfig(lr=1e-2), stage.parameter_rows())
    backward(stage, 1)
    optimizer.step()
    weights.publish()
    weights.clear_gradients()
    assert accumulated(weights) == {}
    assert all(p.grad is None for p in weights.model.values())
    for name, parameter in weights.model.items():
        assert not torch.equal(parameter, before[name]), name
        assert torch.equal(parameter, weights.master[name].to(dtype)), name


@pytest.mark.shows("parallel.bf16")
def test_bfloat16_training_follows_float32_training():
    runs = {}
    for dtype in (torch.float32, torch.bfloat16):
        stage = stage_of(dtype)
        weights = Weights(stage.canonical_parameters())
        optimizer = AdamW(weights.master, OptimConfig(lr=3e-3), stage.parameter_rows())
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


class _Widths(TorchDispatchMode):
    """The operations that return a number of another floating point dtype than float64."""

    def __init__(self):
        super().__init__()
        self.narrow = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        floats = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor) and t.is_floating_point()]
        if any(t.dtype != torch.float64 for t in floats):
            self.narrow.add(str(func))
        return out


LATENT = {"multi_latent_attention": True, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"num_moe_experts": 4, "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0.1}
TURNED = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 4, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    "sizes",
    [
        {"qk_layernorm": True, "attention_backend": "unfused", "rotary_scaling_type": "llama3"},
        {**LATENT, **EXPERTS, **TURNED, "qk_pos_emb_head_dim": 6, "mtp_num_layers": 1, "moe_z_loss_coeff": 0.1},
    ],
    ids=["dense", "latent, experts and mtp"],
)
def test_no_operation_of_a_step_in_float64_gives_narrower_numbers(sizes):
    stage = whole_model(tiny(**sizes), 5, torch.float64)
    weights = Weights(stage.canonical_parameters())
    optimizer = AdamW(weights.master, OptimConfig(lr=1e-2), stage.parameter_rows())
    tokens, labels = torch.randint(52, (2, 2, 7))
    mask = torch.ones(2, 7)
    with _Widths() as widths:
        losses = [microbatch_loss(logits, labels, mask, 14) for logits in stage(tokens)]
        sum(losses).backward()
    assert widths.narrow == set()
    optimizer.step()
    tensors = [*accumulated(weights).values(), *(e["exp_avg_sq"] for e in optimizer.state.values()), *stage.buffers()]
    assert {t.dtype for t in (*weights.master.values(), *tensors)} == {torch.float64}
