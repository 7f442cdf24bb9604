"""The same for what a layer may hold: experts with auxiliary losses and moving biases, and MTP."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy
import torch
from oracle.data import microbatches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.plan.build import build_plan
from ppctl.train.session import build_session
from ppctl.train.step import Trainer

STEPS, SEQ = 4, 12


SIZES = dict(num_layers=5, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, vocab_size=320)


EXPERTS = dict(num_moe_experts=8, moe_router_topk=3, moe_ffn_hidden_size=12)


DEEPSEEK = EXPERTS | dict(
    moe_layer_freq="[0]+[1]*4",
    moe_shared_expert_intermediate_size=20,
    moe_router_score_function="sigmoid",
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=0.01,
    moe_router_num_groups=4,
    moe_router_group_topk=2,
    moe_router_topk_scaling_factor=2.5,
    moe_router_load_balancing_type="seq_aux_loss",
    moe_aux_loss_coeff=0.01,
    mtp_loss_scaling_factor=0.3,
)


MODELS = {
    "deepseek": DEEPSEEK | dict(mtp_num_layers=1),
    "deepseek, tied, two MTP modules": DEEPSEEK | dict(mtp_num_layers=2, share_embeddings_and_output_weights=True),
    "softmax": EXPERTS | dict(moe_aux_loss_coeff=0.02, moe_z_loss_coeff=0.001),
    "dense, MTP": dict(mtp_num_layers=1),
    "latent attention": EXPERTS
    | dict(
        multi_latent_attention=True,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_head_dim=4,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        moe_layer_freq="[0]+[1]*4",
    ),
}


def config_of(text: Path, kind: str, m: int, layout: str, pp: int, dp: int = 1, ep: int = 1) -> RunConfig:
    config = RunConfig(model=ModelConfig(**SIZES, **MODELS[kind]))
    parallel = config.parallel
    parallel.pipeline_model_parallel_size, parallel.pipeline_model_parallel_layout = pp, layout
    parallel.virtual_pipeline_model_parallel_size = (layout.count("|") + 1) // pp
    parallel.data_parallel_size, parallel.expert_model_parallel_size = dp, ep
    parallel.overlap_p2p_comm, parallel.batch_p2p_comm, parallel.batch_p2p_sync = True, False, False
    parallel.deallocate_pipeline_outputs = True
    config.data.path, config.data.seq_length = str(text), SEQ
    config.train.steps, config.train.micro_batch_size, config.train.global_batch_size = STEPS, 2, 2 * m * dp
    config.optim.lr, config.optim.warmup_steps = 1e-2, 2
    config.launch.device, config.launch.nodes, config.launch.gpus_per_node = "cpu", 1, pp * dp
    return config


def train_cut(mapping: dict) -> tuple[list[dict], dict]:
    """Runs in a rank: what each step said, and this rank's weights and biases after STEPS steps."""
    config = from_mapping(mapping)
    given = {} if config.pipeline.pp_batch_size == 1 else {"pipeline.pp_batch_size": "command line"}
    plan = build_plan(config, given)
    assert not plan.problems, plan.problems
    session = build_session(config, plan, torch.distributed.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, session.data.batches())
    records = [trainer.step(step).record for step in range(STEPS)]
    tensors = dict(session.replica.weights.master)
    for stage in session.model.stages.values():
        tensors |= stage.canonical_buffers()
    return records, {name: t.detach().numpy().copy() for name, t in tensors.items()}


@cache
def reference(text: Path, kind: str, m: int):
    return reference_of(config_of(text, kind, m, "", 1))


def reference_of(config: RunConfig):
    """What one process makes of the config's model and data."""
    train, data = config.train, microbatches(config, STEPS)
    return train_reference(config.model, config.optim, train.seed, data, train.steps)


def hold_to_reference(text: Path, kind: str, layout: str, pp: int, m: int, calls: int = 1) -> None:
    config = config_of(text, kind, m, layout, pp)
    if calls > 1:
        config.pipeline.pp_batch_size = 2 * m // calls
    hold(config, reference(text, kind, m))


def hold(config: RunConfig, expected, timeout: float = 60.0) -> None:
    """Train the config's cut, and compare every bit."""
    seen: set[str] = set()
    pp = config.parallel.pipeline_model_parallel_size
    for records, weights in run_ranks(train_cut, pp, to_mapping(config), timeout=timeout):
        assert [r["loss"] for r in records] == expected.losses
        assert [r["grad_norm"] for r in records] == expected.norms
        assert [r.get("mtp_loss", 0.0) for r in records] == expected.mtp_losses
        assert [r.get("aux_loss", 0.0) for r in records] == expected.aux_losses
        for name, value in weights.items():
            assert (value == expected.weights[name].numpy()).all(), name
        seen |= weights.keys()
    assert seen == expected.weights.keys()
    assert expected.losses[-1] < expected.losses[0]


def together(results: list[tuple[list[dict], dict]]) -> dict:
    """All ranks' tensors by name; experts that are spread over ranks behind each other, in order of ranks."""
    found: dict[str, list] = {}
    for _, tensors in results:
        for name, value in tensors.items():
            parts = found.setdefault(name, [])
            if not parts or (".experts." in name and not any((value == part).all() for part in parts)):
                parts.append(value)
    return {name: numpy.concatenate(parts) for name, parts in found.items()}
