"""What came after the device run of 2026-11-26, on a GPU against the CPU or against steps that are known."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from one_rank import tiny_config, trainer_of
from ranks import run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.model.attention import LatentAttention
from ppctl.model.rotary import Rotary
from ppctl.plan.build import build_plan
from ppctl.train import rank_model
from ppctl.weight_gradients.wide_sums import WideSum

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]

LATENT = dict(
    multi_latent_attention=True, q_lora_rank=64, kv_lora_rank=64, qk_head_dim=32, qk_pos_emb_head_dim=16, v_head_dim=32
)
EXPERTS = dict(num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=96)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["the", "of", "stage", "rank", "bubble"], k=5000)))
    return path


def config_of(text: Path, device: str, **model: Any) -> RunConfig:
    config = tiny_config(text, device)
    for name, value in model.items():
        setattr(config.model, name, value)
    return config


def losses(mapping: dict[str, Any], added: bool = True) -> tuple[list[list[float]], str]:
    """(Loss and norm of three steps, how gradients were added) on this rank's device."""
    choose = rank_model.choose_kernels
    if not added:
        rank_model.choose_kernels = lambda config, can: choose(config, replace(can, adds_products=False))
    kind = mapping["launch"]["device"]
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    trainer = trainer_of(mapping, device, dist.get_rank())
    records = [trainer.step(step).record for step in range(3)]
    how = trainer.session.model.kernels.names()["gradients"]
    return [[record["loss"], record["grad_norm"]] for record in records], how


def test_steps_in_16_bits_whose_sums_are_made_by_products_are_those_of_rounded_gradients(
    text: Path, monkeypatch
) -> None:
    """Of latent attention and experts: products beside each other, the one with a gap, the router's."""
    monkeypatch.setattr("ranks.GPUS", 1)
    config = config_of(text, "cuda", **LATENT, **EXPERTS, num_query_groups=None)
    config.parallel.bf16 = True
    found = [run_ranks(losses, 1, to_mapping(config), added, over="nccl", timeout=120)[0] for added in (True, False)]
    assert [how for _, how in found] == ["added by products", "added behind products"]
    (by_products, _), (behind, _) = found
    for one, other in zip(by_products, behind, strict=True):
        assert one == pytest.approx(other, rel=2e-2)


def sums_of(module: torch.nn.Module) -> dict[str, Any]:
    """Sums of gradients by matrix, which its products add to, as in training."""
    sums: dict[str, Any] = {}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 2:
            parameter.wide_sum = WideSum(partial(sums.get, name), partial(sums.__setitem__, name))
    return sums


def attended(device: str, dtype: torch.dtype, *, added: bool) -> dict[str, torch.Tensor]:
    """The result of latent attention, the gradient of its input, and those of its matrices."""
    model = ModelConfig(hidden_size=128, num_attention_heads=4, num_query_groups=None, **LATENT)
    draw = torch.Generator().manual_seed(0)
    attention = LatentAttention(model)
    for parameter in attention.parameters():
        given = (
            torch.randn(parameter.shape, generator=draw) * 0.1 if parameter.dim() == 2 else torch.ones(parameter.shape)
        )
        parameter.data = given.bfloat16().to(device, dtype)
    x, g = (torch.randn(2, 256, 128, generator=draw).bfloat16().to(device, dtype) for _ in range(2))
    sums = sums_of(attention) if added else {}
    out = attention(x.requires_grad_(), Rotary(model).turns(x, 256))
    out.backward(g)
    made = {name: p.grad for name, p in attention.named_parameters() if p.grad is not None} | sums
    return {name: each.detach().double().cpu() for name, each in {"out": out, "x": x.grad, **made}.items()}


def test_latent_attention_whose_products_make_sums_is_as_near_to_the_cpus_as_one_whose_do_not() -> None:
    exact = attended("cpu", torch.float32, added=False)
    plain, own = (attended("cuda", torch.bfloat16, added=added) for added in (False, True))
    assert own.keys() == plain.keys() == exact.keys()
    for name, right in exact.items():
        wrong, usual = ((each[name] - right).abs().max() for each in (own, plain))
        assert wrong <= 2 * usual + 1e-2 * right.abs().max(), name


@pytest.mark.timeout(300)
def test_tokens_that_go_by_node_train_as_those_that_go_straight(text: Path) -> None:
    """Four ranks on one GPU, taken for two nodes of two."""
    found = []
    for dispatch in ("flat", "by_node"):
        config = config_of(text, "cuda", **EXPERTS)
        config.parallel.virtual_pipeline_model_parallel_size = 1
        config.parallel.data_parallel_size = config.parallel.expert_model_parallel_size = 4
        config.launch.nodes, config.launch.gpus_per_node, config.launch.share_gpu = 2, 2, True
        config.parallel.expert_dispatch = dispatch
        assert build_plan(config, {}).problems == ()
        found.append([rank for rank, _ in run_ranks(losses, 4, to_mapping(config), over="shared", timeout=140)])
    for flat, by_node in zip(*found, strict=True):
        for one, other in zip(flat, by_node, strict=True):
            assert other == pytest.approx(one, rel=1e-5)
