"""What a split backward keeps between I and W: the plan's bytes are those of the storages, of every kind of layer."""

from __future__ import annotations

import pytest
import torch

from ppctl.config.schema import ModelConfig, TrainConfig
from ppctl.cost.operands import is_deferred, stage_operands
from ppctl.cost.setting import Setting
from ppctl.geometry.layers import parse_layers
from ppctl.model.recompute import recompute
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec
from ppctl.weight_gradients.deferred import DeferredGradients, collecting

SIZES = dict(num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, vocab_size=64)
EXPERTS = dict(num_moe_experts=4, moe_router_topk=2, moe_ffn_hidden_size=24)
LATENT = dict(multi_latent_attention=True, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=12)
MODELS = {
    "dense": {},
    "grouped queries": {"num_query_groups": 2, "qk_layernorm": True, "add_qkv_bias": True},
    "experts": EXPERTS,
    "shared experts": EXPERTS | {"moe_shared_expert_intermediate_size": 20},
    "latent attention": LATENT | {"q_lora_rank": 16},
    "latent keys alone": LATENT,
    "MTP": {"mtp_num_layers": 2},
    "MTP of experts": EXPERTS | {"mtp_num_layers": 1},
}
WAYS = {
    "nothing": {},
    "full": {"recompute_granularity": "full"},
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "core_attn"]},
}
B, S = 2, 16


def put_off_by(model: ModelConfig, layers: list[str], train: TrainConfig) -> tuple[DeferredGradients, torch.nn.Module]:
    """A stage's F and I."""
    spec = StageSpec(0, 0, 0, parse_layers(layers), (), (), 0, 0, 0)
    stage = build_stage(spec, model, seed=0, dtype=torch.float32, device="cpu")
    recompute(stage, train, 0)
    tokens = torch.randint(0, model.vocab_size, (B, S))
    x = torch.randn(B, S, model.hidden_size, requires_grad=True)
    gradients = DeferredGradients(stage.whole)
    with collecting(gradients):
        outputs = stage(tokens if "embedding" in layers else x, tokens=tokens)
    seeds = [torch.randn_like(out) for out in outputs]
    with collecting(gradients, backward=True):
        torch.autograd.backward(outputs, seeds)
    del outputs, seeds
    return gradients, stage


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_planned_bytes_are_those_of_the_storages(kind: str, way: str) -> None:
    model, train = ModelConfig(**SIZES, **MODELS[kind]), TrainConfig(**WAYS[way])
    modules = [f"mtp.{i}" for i in range(model.mtp_num_layers or 0)]
    for layers in (["embedding", "decoder.0", "decoder.1", *modules], ["decoder.0"], ["embedding"]):
        gradients, stage = put_off_by(model, layers, train)
        kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in gradients._kept()}
        tokens = B * S * 8 * ("embedding" in layers or bool(modules and "mtp.0" in layers))
        numbers = sum(t.untyped_storage().nbytes() for t in gradients._kept() if t.dtype == torch.int64)
        assert (numbers > 0) == (tokens > 0), "the step's own token ids"
        planned = stage_operands(model, parse_layers(layers), Setting(B, S, 4, train=train)).kept
        integers = {t.untyped_storage().data_ptr() for t in gradients._kept() if t.dtype == torch.int64}
        assert sum(size for place, size in kept.items() if place not in integers) == planned, layers
        rows = stage.parameter_rows()
        named = {
            name for name, p in stage.canonical_parameters().items() if any(p is own for own in gradients.parameters)
        }
        assert named == {name for name, row in rows.items() if is_deferred(row)}
