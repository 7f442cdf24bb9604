"""The plan's memory against live storages over combinations of parallel axes: every rank, at the peak of a step, within
3 %. Experts get even numbers of rows, as the plan has them."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from axis_runs import MODELS, world_of
from axis_runs import config_of as axes_config
from live_memory import LiveBytes
from own_worlds import in_own_worlds
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.data.batches import StepBatch
from ppctl.model.router import Router
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

CLOSE = 0.03
SEQ = 128
WIDER = dict(hidden_size=64, ffn_hidden_size=176, vocab_size=331, num_attention_heads=8)
# Values as wide as keys: what torch's kernel on the CPU fuses.
LATENT = dict(q_lora_rank=48, kv_lora_rank=32, qk_head_dim=8, qk_pos_emb_head_dim=8, v_head_dim=16)
EXPERTS = dict(moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=48)

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tp": ("grouped", dict(tp=2)),
    "sp, groups fewer than ranks": ("grouped", dict(tp=4, sp=True)),
    "cp ring, sp": ("grouped", dict(tp=2, sp=True, cp=2)),
    "latent, sp": ("latent", dict(tp=2, sp=True)),
    "experts, etp": ("experts", dict(tp=2, sp=True)),
    "experts, ep, pp": ("experts", dict(tp=2, sp=True, ep=2, etp=1, pp=2, layout="Et*2|t*2L")),
}
WHOLE: dict[str, tuple[str, dict[str, Any]]] = {
    "cp gather": ("grouped", dict(cp=2, ways="all_gather")),
    "cp heads": ("grouped", dict(cp=2, ways="a2a")),
    "cp heads and ring": ("grouped", dict(cp=4, ways="a2a+p2p", levels=[2, 2])),
    "tp 4": ("biases", dict(tp=4)),
    "sp, pp": ("grouped", dict(tp=2, sp=True, pp=2, layout="Et*2|t*2L")),
    "recomputed": (
        "grouped", dict(tp=2, sp=True, recompute_granularity="full", recompute_method="uniform"),
    ),
    "deepseek, ep": ("deepseek", dict(tp=2, sp=True, ep=2, dp=2)),
    "split": ("grouped", dict(tp=2, sp=True, pp=2, layout="Et*2|t*2L", pp_schedule="zb_h1")),
}  # fmt: skip


def config_of(kind: str, axes: dict[str, Any]) -> Any:
    config = axes_config(kind, **axes, params_dtype="float32")
    wider = (
        WIDER
        | (LATENT if "kv_lora_rank" in MODELS[kind] else {})
        | (EXPERTS if "num_moe_experts" in MODELS[kind] else {})
    )
    for key, value in wider.items():
        if key not in LATENT or getattr(config.model, key) is not None:
            setattr(config.model, key, value)
    config.data.seq_length = SEQ
    return config


def evenly(self: Router, scores: torch.Tensor) -> torch.Tensor:
    """Each expert as often as every other."""
    topk = self.model.moe_router_topk
    return (torch.arange(scores[..., 0].numel() * topk) % self.num_experts).view(*scores.shape[:-1], topk)


class Batches:
    def __init__(self, config: Any, count: int) -> None:
        shape = count, config.train.micro_batch_size, SEQ
        dice = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(config.model.vocab_size, shape, generator=dice)
        self.total = count * config.train.micro_batch_size * SEQ * (config.parallel.data_parallel_size or 1)

    def step(self, step: int) -> StepBatch:
        return StepBatch(self.tokens, self.tokens, torch.ones(self.tokens.shape), self.total, step)


def live_and_planned(mappings: list[dict[str, Any]]) -> list[tuple[int, int]]:
    """Runs in a rank: of each config (bytes of live storages at the peak of the second step, planned)."""
    return in_own_worlds(lambda mapping: _live_and_planned(from_mapping(mapping)), mappings)


def _live_and_planned(config: Any) -> tuple[int, int]:
    etp = "parallel.expert_tensor_parallel_size"
    plan = build_plan(config, {} if config.parallel.expert_tensor_parallel_size is None else {etp: "command line"})
    assert not plan.problems, plan.problems
    batches = Batches(config, plan.num_microbatches)
    with LiveBytes() as live, patch.object(Router, "_choose", evenly):
        session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
        trainer = Trainer(session, batches)  # type: ignore[arg-type]
        trainer.step(0)
        live.peak = 0
        trainer.step(1)
    session.pipeline.close()
    return live.peak, plan.pp_ranks[session.own.pp_rank].peak_bytes


@cache
def results(world: int, whole: bool) -> dict[str, list[tuple[int, int]]]:
    configs = {name: config_of(*case) for name, case in (WHOLE if whole else CASES).items()}
    configs = {name: config for name, config in configs.items() if world_of(config) == world}
    ranks = run_ranks(live_and_planned, world, [*map(to_mapping, configs.values())], timeout=300)
    return {name: [rank[number] for rank in ranks] for number, name in enumerate(configs)}


NAMES = [*CASES, *(pytest.param(name, marks=pytest.mark.whole) for name in WHOLE)]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", NAMES)
def test_live_storages_at_the_peak_are_the_planned_bytes(name: str) -> None:
    found = results(world_of(config_of(*{**CASES, **WHOLE}[name])), name in WHOLE)[name]
    off = {rank: f"{live:,} of {planned:,} ({live / planned - 1:+.1%})" for rank, (live, planned) in enumerate(found)}
    assert all(abs(live - planned) <= CLOSE * live for live, planned in found), off
