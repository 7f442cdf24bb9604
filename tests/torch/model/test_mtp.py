"""Multi-token prediction against its formula, written without the module."""

import pytest
import torch
import torch.nn.functional as F
from cuts import tiny

from ppctl.cost.parameter_counts import stage_count
from ppctl.geometry.layers import parse_layers
from ppctl.model.loss import mtp_targets
from ppctl.model.stage import build_stage, meta_stage
from ppctl.plan import StageSpec

MOE = dict(num_moe_experts=4, moe_ffn_hidden_size=12, moe_layer_freq="[0]+[1]*3", moe_router_enable_expert_bias=True)


def stage_of(layers, model):
    spec = StageSpec(0, 0, 0, parse_layers(layers), (), (), 0, 0, 0)
    stage = build_stage(spec, model, seed=7, dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in stage.parameters():
            if parameter.dim() == 1:  # ones would hide a norm that is not applied
                parameter.uniform_(0.5, 1.5, generator=generator)
    return stage


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


@pytest.mark.parametrize("modules", [1, 2])
def test_logits_are_those_of_the_formula(modules):
    model = tiny(mtp_num_layers=modules, num_layers=2)
    stage = stage_of(["embedding", "decoder.0", "decoder.1", *(f"mtp.{k}" for k in range(modules)), "loss"], model)
    tokens = torch.randint(model.vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    weights, eps = dict(stage.named_parameters()), model.norm_epsilon
    turns = stage.rotary.turns(tokens.float(), tokens.shape[1])

    x = weights["tok_embeddings.weight"][tokens]
    for layer in stage.layers.values():
        x = layer(x, turns)
    hidden = rms(x, weights["norm.weight"], eps)
    expected = [hidden]
    for k in range(modules):
        later = torch.zeros_like(tokens)
        later[:, : -k - 1] = tokens[:, k + 1 :]  # behind the end of the sequence stands token 0
        embedded = rms(weights["mtp.tok_embeddings.weight"][later], weights[f"mtp.{k}.enorm.weight"], eps)
        previous = rms(hidden, weights[f"mtp.{k}.hnorm.weight"], eps)
        joined = torch.cat((embedded, previous), -1) @ weights[f"mtp.{k}.eh_proj.weight"].T
        hidden = rms(stage.mtp[str(k)].layer(joined, turns), weights[f"mtp.{k}.norm.weight"], eps)
        expected.append(hidden)
    logits = stage(tokens)
    assert len(logits) == 1 + modules
    for ours, state in zip(logits, expected, strict=True):
        assert torch.allclose(ours, state @ weights["output.weight"].T, atol=1e-5)


def test_stages_cut_around_mtp_are_the_whole_model():
    model = tiny(mtp_num_layers=2, **MOE)
    names = ["embedding", *(f"decoder.{i}" for i in range(4)), "mtp.0", "mtp.1", "loss"]
    tokens = torch.randint(model.vocab_size, (2, 9))
    whole = stage_of(names, model)
    whole.load_state_dict({name: value for name, value in whole.state_dict().items()})
    cuts = [names[:1], names[1:5], [], names[5:7], [], names[7:]]
    stages = [meta_stage(parse_layers(cut), model).to_empty(device="cpu") for cut in cuts]
    for stage in stages:
        stage.load_state_dict({name: value for name, value in whole.state_dict().items() if name in stage.state_dict()})
    message = (tokens,)
    for stage in stages:
        message = stage(*message, tokens=tokens)
    for ours, expected in zip(message, whole(tokens), strict=True):
        assert torch.equal(ours, expected)


def test_targets_end_with_the_sequence_and_with_a_document():
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    mask = torch.tensor([[1.0, 1, 0, 1, 1, 1]])  # the third label would be another document's first token
    first, second = mtp_targets(labels, mask, 2)
    assert first[0].tolist() == [[2, 3, 4, 5, 6, 0]] and first[1].tolist() == [[1, 0, 0, 1, 1, 0]]
    assert second[0].tolist() == [[3, 4, 5, 6, 0, 0]] and second[1].tolist() == [[0, 0, 0, 1, 0, 0]]


@pytest.mark.parametrize(
    "changes", [{}, MOE, MOE | dict(moe_router_enable_expert_bias=False), MOE | dict(qk_layernorm=True)]
)
@pytest.mark.parametrize("modules", [None, 1, 2])
def test_what_is_built_is_what_the_closed_forms_count(changes, modules):
    model = tiny(mtp_num_layers=modules, moe_shared_expert_intermediate_size=6, **changes)
    mtp = [f"mtp.{k}" for k in range(modules or 0)]
    cuts = (
        ["embedding"],
        ["decoder.0"],
        ["decoder.2", "decoder.3"],
        mtp,
        ["decoder.3", *mtp, "loss"],
        ["loss"],
        [],
    )
    for layers in map(parse_layers, cuts):
        stage = meta_stage(layers, model)
        built = sum(t.numel() for t in (*stage.parameters(), *stage.buffers()))
        assert built == stage_count(model, layers).total(), layers


def test_the_embedding_beside_mtp_is_read_by_no_other_layer():
    model = tiny(mtp_num_layers=1)
    stage = stage_of(["embedding", "decoder.0", "mtp.0", "loss"], model)
    tokens = torch.randint(model.vocab_size, (1, 6))
    plain, further = stage(tokens)
    with torch.no_grad():
        stage.mtp["tok_embeddings"].weight.mul_(2).add_(0.1 * torch.randn_like(stage.mtp["tok_embeddings"].weight))
    again, other = stage(tokens)
    assert torch.equal(plain, again) and not torch.equal(further, other)
    F.mse_loss(other, further).backward()
    assert stage.mtp["tok_embeddings"].weight.grad.any()
