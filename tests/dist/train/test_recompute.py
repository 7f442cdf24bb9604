"""Activation recompute: no bit changes, less lives from a forward to its backward, and the in-flight law holds."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dense_runs import config_of, hold_to_reference, session_of, trainer_of
from live_memory import LiveBytes, count_in_flight
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig, TrainConfig
from ppctl.geometry.layers import parse_layers, recomputed_modules, recomputed_runs
from ppctl.model.recompute import recompute
from ppctl.model.stage import StageModule, build_stage
from ppctl.plan import StageSpec

FULL = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
WAYS = {
    "full": FULL,
    "full, two layers a run": FULL | {"recompute_method": "uniform", "recompute_num_layers": 2},
    "full, the first layer of a stage": FULL | {"recompute_method": "block", "recompute_num_layers": 1},
    "full on one stage": FULL | {"recompute_stages": [1]},
    "full, one microbatch of a window spared": FULL | {"num_microbatches_with_partial_activation_checkpoints": 1},
    "attention": SELECTIVE,
    "feed-forward": SELECTIVE | {"recompute_modules": ["mlp"]},
    "norms": SELECTIVE | {"recompute_modules": ["layernorm"]},
    "all three": SELECTIVE | {"recompute_modules": ["core_attn", "mlp", "layernorm"]},
}


@pytest.mark.shows(
    "parallel.num_microbatches_with_partial_activation_checkpoints",
    "train.recompute_granularity",
    "train.recompute_method",
    "train.recompute_num_layers",
    "train.recompute_modules",
    "train.recompute_stages",
)
@pytest.mark.parametrize("way", WAYS)
def test_recompute_changes_no_bit(text, way):
    hold_to_reference(text, pp=2, vpp=2, m=4, **WAYS[way])


@pytest.mark.parametrize("way", ["full", "attention"])
def test_activations_in_flight_are_the_plans_with_recompute(text: Path, way: str) -> None:
    mapping = to_mapping(config_of(text, pp=2, vpp=2, m=6, **WAYS[way]))
    for rank, (measured, planned) in enumerate(run_ranks(count_in_flight, 2, mapping)):
        assert measured == planned > 0, f"rank {rank}"


def peak_bytes(mapping: dict) -> int:
    """Most bytes alive in a step, once all state exists."""
    trainer = trainer_of(session_of(mapping))
    trainer.step(0)
    with LiveBytes() as live:
        trainer.step(1)
    return live.peak


def test_the_more_is_recomputed_the_less_is_alive(text: Path) -> None:
    def measured(**way: object) -> list[int]:
        config = config_of(text, pp=2, vpp=1, m=4, **way)
        config.data.seq_length = 64  # activations, not weights
        return run_ranks(peak_bytes, 2, to_mapping(config))

    nothing, norms, most, spared, full = (
        measured(**way)
        for way in ({}, WAYS["norms"], WAYS["all three"], WAYS["full, one microbatch of a window spared"], FULL)
    )
    assert full[0] < most[0] < norms[0] < nothing[0]
    assert full[1] < most[1] < norms[1] < nothing[1], "also where the loss is"
    assert full[0] < spared[0] < nothing[0]


MLA = ModelConfig(
    num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, multi_latent_attention=True,
    q_lora_rank=12, kv_lora_rank=8, qk_head_dim=4, qk_pos_emb_head_dim=4, v_head_dim=8, vocab_size=32,
)  # fmt: skip


def forward_and_backward(
    model: ModelConfig, train: TrainConfig, layers: tuple[str, ...] = ("embedding", "decoder.0", "decoder.1")
) -> tuple[int, list[torch.Tensor]]:
    """(bytes that one forward leaves alive, all gradients in order) of a stage without a loss."""
    spec = StageSpec(0, 0, 0, parse_layers(layers), (), (), 0, 0, 0)
    stage: StageModule = build_stage(spec, model, seed=1, dtype=torch.float32, device="cpu")
    recompute(stage, train, 0)
    tokens = torch.arange(64).view(2, 32) % 32
    with LiveBytes() as live:
        outputs = stage(tokens)
        held = live.now()
    sum(out.square().sum() for out in outputs).backward()
    return held, [p.grad for p in stage.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "modules", [["mla_up_proj"], ["layernorm", "mla_up_proj"], ["core_attn", "mla_up_proj", "mlp"]]
)
def test_latent_attention_recomputes_its_projections_to_the_bit(modules):
    kept, expected = forward_and_backward(MLA, TrainConfig())
    held, gradients = forward_and_backward(
        MLA, TrainConfig(recompute_granularity="selective", recompute_modules=modules)
    )
    assert len(gradients) == len(expected) == 2 * 12 + 1
    assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True))
    assert held < 0.8 * kept


EXPERTS = ModelConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=64, num_attention_heads=4, vocab_size=32,
    num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=96, moe_router_enable_expert_bias=True,
)  # fmt: skip


@pytest.mark.parametrize("modules", [["moe"], ["moe_act"], ["moe_act", "layernorm"]])
def test_experts_are_recomputed_to_the_bit(modules):
    kept, expected = forward_and_backward(EXPERTS, TrainConfig())
    held, gradients = forward_and_backward(
        EXPERTS, TrainConfig(recompute_granularity="selective", recompute_modules=modules)
    )
    assert len(gradients) == len(expected) > 10
    assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True))
    assert held < 0.95 * kept


@pytest.mark.parametrize(
    ("outer", "modules"),
    [("moe", ["moe", "moe_act"]), ("experts", ["experts", "moe_act"]), ("moe", ["experts", "moe"])],
    ids=str,
)
def test_what_lies_in_a_recomputed_module_is_made_again_with_it_and_keeps_nothing_itself(outer, modules):
    forward_and_backward(EXPERTS, TrainConfig())  # which makes what all later calls share
    found = []
    for named in ([outer], modules, modules[::-1]):
        train = TrainConfig(recompute_granularity="selective", recompute_modules=named)
        found.append(forward_and_backward(EXPERTS, train))
    assert len({held for held, _ in found}) == 1
    for _, gradients in found[1:]:
        assert all(map(torch.equal, found[0][1], gradients))


DENSE = ModelConfig(num_layers=2, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, vocab_size=32)
MTP = {"dense": DENSE, "latent attention": MLA, "experts": EXPERTS}


@pytest.mark.parametrize("kind", MTP)
@pytest.mark.parametrize("way", ["full", "full, two layers a run", "all three"])
def test_multi_token_prediction_is_recomputed_to_the_bit(kind, way):
    """Two modules beside two layers: their decoder layers are made again, with the same gradients."""
    model = replace(MTP[kind], mtp_num_layers=2)
    layers = ("embedding", "decoder.0", "decoder.1", "mtp.0", "mtp.1")
    kept, expected = forward_and_backward(model, TrainConfig(), layers)
    held, gradients = forward_and_backward(model, TrainConfig(**WAYS[way]), layers)
    assert len(gradients) == len(expected)
    assert all(torch.equal(g, e) for g, e in zip(gradients, expected, strict=True))
    decoder_alone = FULL | {"recompute_method": "block", "recompute_num_layers": 2}
    less = kept if way == "all three" else forward_and_backward(model, TrainConfig(**decoder_alone), layers)[0]
    assert held < less <= kept


LAYERS = parse_layers(["embedding", "decoder.0", "decoder.1", "decoder.2", "mtp.0", "loss"])


@pytest.mark.parametrize(
    ("method", "number", "runs"),
    [
        (None, None, (("decoder.0",), ("decoder.1",), ("decoder.2",), ("mtp.0",))),
        ("uniform", 2, (("decoder.0", "decoder.1"), ("decoder.2",), ("mtp.0",))),
        ("block", 2, (("decoder.0",), ("decoder.1",))),
        ("block", None, (("decoder.0",), ("decoder.1",), ("decoder.2",), ("mtp.0",))),
    ],
)
def test_what_full_recompute_means(method, number, runs):
    train = TrainConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=number)
    assert recomputed_runs(train, 3, LAYERS) == tuple(map(parse_layers, runs))
    train.recompute_stages = [0, 1]
    assert recomputed_runs(train, 3, LAYERS) == ()
    assert recomputed_modules(train, 0) == ()


def test_keys_of_the_config_reach_the_stages():
    config = RunConfig()
    config.train.recompute_granularity = "selective"
    assert recomputed_modules(from_mapping(to_mapping(config)).train, 5) == ("core_attn",)


RECOMPUTED = """
import sys, torch
from ppctl.model.recompute import Switch, _checkpointed

weight, x = torch.ones(4, 4, requires_grad=True), torch.ones(2, 4, requires_grad=True)
y = _checkpointed(lambda x: torch.tanh(x @ weight), Switch())(x)
torch.autograd.backward((y,), (torch.ones(2, 4),))
assert weight.grad is not None
sys.exit("torch._dynamo" in sys.modules)
"""


def test_recomputing_imports_no_compiler() -> None:
    """It would cost every rank two seconds."""
    assert subprocess.run([sys.executable, "-c", RECOMPUTED], check=False).returncode == 0
