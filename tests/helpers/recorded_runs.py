"""Recorded runs of other systems as ppctl configs, and what their plans say: for tests and for benchmarks.

Each row is planned through `build_plan`, as `ppctl plan` does. Must not know floors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.schema import (
    CostConfig,
    DataConfig,
    LaunchConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    TrainConfig,
)
from ppctl.plan import Plan, build_plan

GOLDEN = Path(__file__).parents[1] / "golden"
GIB = 2**30


class Row(NamedTuple):
    """One figure, planned and recorded; `counted` where the setting is known and not inferred."""

    name: str
    planned: float
    recorded: float
    counted: bool = True

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.planned / self.recorded - 1


def megatron_records() -> list[dict[str, Any]]:
    """Megatron-LM's golden values with their settings."""
    records: list[dict[str, Any]] = json.loads((GOLDEN / "memory_settings.json").read_text())["records"]
    return records


def megatron_plan(record: dict[str, Any]) -> Plan:
    """The plan of one of Megatron-LM's functional tests."""
    given = {"parallel.expert_tensor_parallel_size": "recorded"} if record["etp"] else {}
    plan = build_plan(megatron_config(record), given)
    last = [n.index for s in plan.stages if s.pp_rank == plan.sizes.pp - 1 for n in s.layers if n.kind == "decoder"]
    assert not plan.problems, plan.problems
    assert last == record["last_stage_layers"], record["test"]
    return plan


def megatron_config(record: dict[str, Any]) -> RunConfig:
    """One record as a config."""
    r = record
    dp = r["dp"] or 1
    return RunConfig(
        model=_megatron_model(r),
        parallel=ParallelConfig(
            tensor_model_parallel_size=r["tp"],
            pipeline_model_parallel_size=r["pp"],
            virtual_pipeline_model_parallel_size=r["chunks_per_rank"] if r["chunks_per_rank"] > 1 else None,
            context_parallel_size=r["cp"],
            expert_model_parallel_size=r["ep"],
            expert_tensor_parallel_size=r["etp"],
            data_parallel_size=dp,
            pipeline_model_parallel_layout=r["layout"],
            sequence_parallel=r["sequence_parallel"] and r["tp"] > 1,
            data_parallel_sharding="optimizer_gradients" if r["distributed_optimizer"] else "none",
            cross_entropy_loss_fusion=r["cross_entropy_fusion"],
            bf16=True,
            **_uneven(r),
        ),
        data=DataConfig(seq_length=r["seq"]),
        train=TrainConfig(
            global_batch_size=r["global_batch"] or 4 * dp * r["pp"] * r["micro_batch"],
            micro_batch_size=r["micro_batch"],
        ),
        launch=LaunchConfig(device="cuda"),
        cost=CostConfig(
            device=r["gpu"],
            allocator="megatron",
            cublas_workspace_mib=r["cublas_workspace_mib"],
            te_workspace_mib=r["te_workspace_mib"] * (5 if r["moe_grouped_gemm"] else 1),
        ),
    )


def _uneven(r: dict[str, Any]) -> dict[str, Any]:
    """How a test without a layout divides layers that its stages cannot share evenly."""
    stages, last = r["pp"] * r["chunks_per_rank"], len(r["last_stage_layers"])
    if r["layout"] or (r["layers"] % stages == 0 and last * r["pp"] == r["layers"]):
        return {}
    if (r["layers"] + 2) % stages == 0:
        return {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
    return {"num_layers_in_first_pipeline_stage": last, "num_layers_in_last_pipeline_stage": last}


def _megatron_model(r: dict[str, Any]) -> ModelConfig:
    mla = r.get("mla") or {}
    names = {
        "q-lora-rank": "q_lora_rank",
        "kv-lora-rank": "kv_lora_rank",
        "qk-head-dim": "qk_head_dim",
        "qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
        "v-head-dim": "v_head_dim",
    }
    return ModelConfig(
        num_layers=r["layers"],
        hidden_size=r["hidden"],
        ffn_hidden_size=r["ffn"],
        num_attention_heads=r["heads"],
        num_query_groups=r["kv_heads"],
        kv_channels=r["kv_channels"],
        vocab_size=r["vocab_padded"],
        max_position_embeddings=r["seq"],
        position_embedding_type=r["position"],
        normalization=r["norm"],
        gated_linear_unit=r["gated"],
        add_bias_linear=r["bias"],
        qk_layernorm=r["qk_layernorm"] and not mla,
        share_embeddings_and_output_weights=r["tied_embeddings"],
        attention_backend=r["attention_backend"],
        attention_dropout=r["attention_dropout"],
        hidden_dropout=r["hidden_dropout"],
        multi_latent_attention=bool(mla),
        **{ours: mla[theirs] for theirs, ours in names.items() if theirs in mla},
        num_moe_experts=r.get("experts"),
        moe_router_topk=r.get("topk") or 2,
        moe_ffn_hidden_size=r.get("moe_ffn"),
        moe_shared_expert_intermediate_size=r.get("shared_expert_ffn"),
        moe_layer_freq=r.get("moe_layer_freq") or 1,
        mtp_num_layers=r["mtp_layers_on_last_stage"] or None,
    )


def megatron_rows() -> tuple[list[Row], list[Row]]:
    """(steady bytes, peak bytes) of the last pp_rank, planned and recorded."""
    steady, peak = [], []
    for record in megatron_records():
        cost = megatron_plan(record).pp_ranks[-1]
        known = not record["world_size_source"].startswith("inferred")
        steady.append(Row(record["test"], cost.state_bytes + cost.buffer_bytes, record["allocated_bytes"], known))
        if record["max_usable"]:
            peak.append(Row(record["test"], cost.peak_bytes, record["max_allocated_bytes"], known))
    return steady, peak


def simumax_rows() -> list[Row]:
    """Peak bytes over all ranks, planned and measured."""
    data = json.loads((GOLDEN / "simumax_settings.json").read_text())
    return [
        Row(r["case"], max(c.peak_bytes for c in simumax_plan(r).pp_ranks), r["max_allocated_gib"] * GIB)
        for r in data["records"]
    ]


def simumax_plan(record: dict[str, Any]) -> Plan:
    """The plan of one of SimuMax's B200 cases."""
    r = record
    deepseek = "E" in r
    unit = 128 * r["tp"]
    model = ModelConfig(
        num_layers=r["layers"],
        hidden_size=r["h"],
        ffn_hidden_size=r["f"],
        num_attention_heads=r["nh"],
        num_query_groups=r.get("kv"),
        vocab_size=-(-(r["V"] + 1) // unit) * unit,
        max_position_embeddings=r["seq"],
        multi_latent_attention=deepseek,
        q_lora_rank=1536 if deepseek else None,
        num_moe_experts=r.get("E"),
        moe_router_topk=r.get("k", 2),
        moe_ffn_hidden_size=r.get("mf"),
        moe_shared_expert_intermediate_size=r.get("sh"),
        moe_layer_freq=f"[0]*1+[1]*{r['layers'] - 1}" if deepseek else 1,
    )
    config = RunConfig(
        model=model,
        parallel=ParallelConfig(
            tensor_model_parallel_size=r["tp"],
            pipeline_model_parallel_size=r["pp"],
            context_parallel_size=r["cp"],
            expert_model_parallel_size=r["ep"],
            expert_tensor_parallel_size=1,
            data_parallel_size=r["dp"],
            sequence_parallel=r["tp"] > 1,
            data_parallel_sharding="optimizer_gradients",
            cross_entropy_loss_fusion=True,
            bf16=True,
        ),
        data=DataConfig(seq_length=r["seq"]),
        train=TrainConfig(global_batch_size=8 * r["dp"], micro_batch_size=1),
        launch=LaunchConfig(device="cuda"),
        cost=CostConfig(device="b200", allocator="megatron_te_2.11", te_workspace_mib=32.0),
    )
    return build_plan(config, {"parallel.expert_tensor_parallel_size": "recorded"})
