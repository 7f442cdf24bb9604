"""A tiny dense model trained in any cut, beside the oracle's one process: configs, sessions, and the bitwise law."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from oracle.data import microbatches
from oracle.reference import train_reference
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.plan.build import build_plan
from ppctl.train.session import Session, build_session
from ppctl.train.step import Trainer

STEPS = 5


SEQ = 16


def config_of(
    text: Path,
    *,
    pp: int,
    vpp: int | None,
    m: int,
    layout: str | None = None,
    tied: bool = False,
    dp: int = 1,
    **parallel: object,
) -> RunConfig:
    config = RunConfig(
        model=ModelConfig(
            num_layers=6,
            hidden_size=16,
            ffn_hidden_size=24,
            num_attention_heads=2,
            num_query_groups=1,
            share_embeddings_and_output_weights=tied,
        )
    )
    config.parallel.pipeline_model_parallel_size = pp
    config.parallel.virtual_pipeline_model_parallel_size = vpp
    config.parallel.data_parallel_size = dp
    config.parallel.pipeline_model_parallel_layout = layout
    config.parallel.overlap_p2p_comm, config.parallel.batch_p2p_comm, config.parallel.batch_p2p_sync = (
        True,
        False,
        False,
    )
    config.parallel.deallocate_pipeline_outputs = True
    for key, value in parallel.items():
        owner = next(
            part
            for part in (config.pipeline, config.train, config.optim, config.parallel, config.launch)
            if hasattr(part, key)
        )
        setattr(owner, key, value)
    config.data.path, config.data.seq_length = str(text), SEQ
    config.train.steps, config.train.micro_batch_size = STEPS, 2
    config.train.global_batch_size = 2 * m * dp
    config.optim.lr, config.optim.warmup_steps = 1e-3, 2
    config.launch.device, config.launch.nodes, config.launch.gpus_per_node = "cpu", 1, pp * dp
    return config


def train_cut(mapping: dict, loss_fn: Callable | None = None) -> tuple[list[float], list[float], dict[str, bytes]]:
    """Runs in a rank: losses, norms and this rank's weights after STEPS steps."""
    config = from_mapping(mapping)
    config.pipeline.loss_fn = loss_fn
    given = {} if config.pipeline.pp_batch_size == 1 else {"pipeline.pp_batch_size": "command line"}
    plan = build_plan(config, given)
    assert not plan.problems, plan.problems
    rank = dist.get_rank()
    session = build_session(config, plan, rank, torch.device("cpu"))
    trainer = Trainer(session, session.data.batches())
    records = [trainer.step(step).record for step in range(STEPS)]
    weights = {name: p.detach().numpy().copy() for name, p in session.replica.weights.master.items()}
    return [r["loss"] for r in records], [r["grad_norm"] for r in records], weights


@cache
def reference(
    text: Path,
    m: int,
    tied: bool,
    eps: float = 1e-8,
    scale_grads: bool = False,
    clip_grad: float = 1.0,
    dtype: str = "float32",
):
    config = config_of(text, pp=1, vpp=1, m=m, tied=tied)
    config.optim.eps, config.optim.clip_grad = eps, clip_grad
    batches, dtype = microbatches(config, STEPS), getattr(torch, dtype)
    return train_reference(config.model, config.optim, config.train.seed, batches, scale_grads=scale_grads, dtype=dtype)


def hold_to_reference(text: Path, *, m: int, tied: bool = False, **cut: object) -> None:
    losses, norms, weights, *_ = reference(
        text,
        m,
        tied,
        scale_grads=bool(cut.get("scale_grads_in_schedule")),
        dtype=str(cut.get("params_dtype", "float32")),
    )
    config = config_of(text, m=m, tied=tied, **cut)  # type: ignore[arg-type]
    got = run_ranks(train_cut, cut["pp"], to_mapping(config), config.pipeline.loss_fn)
    seen: set[str] = set()
    for rank, (rank_losses, rank_norms, rank_weights) in enumerate(got):
        assert rank_losses == losses, f"rank {rank}"
        assert rank_norms == norms, f"rank {rank}"
        for name, value in rank_weights.items():
            assert (value == weights[name].numpy()).all(), f"rank {rank}: {name}"
        seen |= rank_weights.keys()
    assert seen == weights.keys()
    assert losses[-1] < losses[0]


CPU = torch.device("cpu")


def session_of(mapping: dict[str, object]) -> Session:
    config = from_mapping(mapping)
    plan = build_plan(config, {})
    assert not plan.problems, plan.problems
    return build_session(config, plan, dist.get_rank(), CPU)


def trainer_of(session: Session, done: int = 0) -> Trainer:
    position = done * session.config.train.global_batch_size
    return Trainer(session, session.data.batches(done, position))
