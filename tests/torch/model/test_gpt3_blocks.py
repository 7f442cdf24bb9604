"""GPT-3's blocks: LayerNorm, biases, GELU, learned positions, and dropout by position."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuts import tiny
from live_memory import LiveBytes
from oracle.reference import whole_model

from ppctl.config.schema import ModelConfig
from ppctl.cost.activations import stage_activations
from ppctl.cost.setting import TORCH_ON_CPU, Setting, for_norms
from ppctl.geometry.layers import parse_layers
from ppctl.model.dropout import Draws, kept, row_keys, sample_key
from ppctl.model.dropped_attention import Dropped, kept_probabilities
from ppctl.model.packing import Packing
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec

GPT3 = {
    "gated_linear_unit": False,
    "add_bias_linear": True,
    "normalization": "LayerNorm",
    "position_embedding_type": "learned_absolute",
    "num_query_groups": None,
    "max_position_embeddings": 32,
}


def shaken(model, seed=1, dtype=torch.float64):
    """The whole model, whose biases and norms are not what they start as."""
    whole = whole_model(model, seed, dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=dtype)
    return whole


def draws(rows, seed=7, step=3):
    return Draws(torch.tensor([sample_key(seed, step, sample) for sample in range(rows)]))


def by_formula(model, w, tokens, packing):
    """Radford et al. 2019 and Brown et al. 2020, with dropout where Megatron has it."""
    b, s = tokens.shape
    h, heads = model.hidden_size, model.num_attention_heads
    positions = torch.arange(s)

    def norm(x, name):
        return F.layer_norm(x, (h,), w[f"{name}.weight"], w[f"{name}.bias"], model.norm_epsilon)

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def key_of(name):
        module = dict(packing["whole"].named_modules())[name]
        return module.keys(packing["draws"])

    def drop(x, name):
        p = model.hidden_dropout
        mask = kept(row_keys(key_of(name)[:, None], positions), torch.arange(h, dtype=torch.int32), p)
        return torch.where(mask, x / (1 - p), 0.0)

    x = drop(w["tok_embeddings.weight"][tokens] + w["position_embeddings.weight"][:s], "after_embedding")
    for i in range(model.num_layers):
        at = f"layers.{i}"
        y = norm(x, f"{at}.attention_norm")
        q, k, v = (linear(y, f"{at}.attention.{n}").view(b, s, heads, -1).transpose(1, 2) for n in ("wq", "wk", "wv"))
        scores = (q @ k.transpose(2, 3) / q.shape[-1] ** 0.5).masked_fill(positions > positions[:, None], -torch.inf)
        p = model.attention_dropout
        keys = dict(packing["whole"].named_modules())[f"{at}.attention.dropout"].keys(packing["draws"])
        mask = kept_probabilities(Dropped(keys, p), heads, positions, positions)
        mixed = (scores.softmax(-1) * mask / (1 - p)) @ v
        x = x + drop(linear(mixed.transpose(1, 2).flatten(2), f"{at}.attention.wo"), f"{at}.after_attention")
        y = linear(norm(x, f"{at}.ffn_norm"), f"{at}.feed_forward.w1")
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        x = x + drop(linear(y, f"{at}.feed_forward.w2"), f"{at}.after_ffn")
    return norm(x, "norm") @ w["output.weight"].T


def test_logits_and_gradients_are_those_of_the_formula():
    model = tiny(**GPT3, hidden_dropout=0.2, attention_dropout=0.3)
    whole = shaken(model)
    tokens = torch.randint(52, (3, 9), generator=torch.Generator().manual_seed(0))
    own = draws(3)
    found = whole(tokens, packing=Packing(draws=own))[0]
    weights = {name: p.detach().clone().requires_grad_() for name, p in whole.named_parameters()}
    wanted = by_formula(model, weights, tokens, {"draws": own, "whole": whole})
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    torch.sin(found).sum().backward()
    torch.sin(wanted).sum().backward()
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize(("hidden", "attention"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.2)])
def test_a_layer_keeps_and_holds_the_planned_bytes(length, hidden, attention):
    """No mask is kept; the longer sequence has more scores at once than anything else."""
    sizes = dict(num_layers=2, hidden_size=64, ffn_hidden_size=176, num_attention_heads=4, vocab_size=320)
    model = ModelConfig(**sizes | GPT3, hidden_dropout=hidden, attention_dropout=attention)
    layers = parse_layers(["decoder.0"])
    plan = stage_activations(model, layers, Setting(4, length, 4, allocator=for_norms(TORCH_ON_CPU, "LayerNorm")))
    stage = build_stage(StageSpec(0, 0, 0, layers, (), (), 0, 0, 0), model, seed=1, dtype=torch.float32, device="cpu")
    for parameter in stage.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with LiveBytes() as live:
        x = torch.randn(4, length, 64, requires_grad=True)
        (out,) = stage(x, packing=Packing(draws=draws(4)))
        kept, in_forward = live.now() - out.nbytes, live.peak
        gradient = torch.randn(out.shape)
        live.peak = 0
        out.backward(gradient)
    assert kept == pytest.approx(plan.kept, rel=0.005)
    assert in_forward == pytest.approx(plan.in_forward, rel=0.03)
    in_backward = live.peak - kept - out.nbytes - gradient.nbytes
    assert in_backward == pytest.approx(plan.in_backward, rel=0.03)
