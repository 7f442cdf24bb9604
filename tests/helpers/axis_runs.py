"""Tiny models in float64 over every parallel axis, beside the oracle's one process: configs, batches and comparisons.

Masks are unequal in every batch, and one microbatch of the first step has no counted token.
"""

from __future__ import annotations

import math
import random
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from oracle.reference import train_reference
from own_worlds import in_own_worlds
from whole_tensors import whole_of

from ppctl.config.mapping import from_mapping
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.data.batches import StepBatch
from ppctl.data.sampler import microbatches
from ppctl.model.packing import ROWS, Documents, Packing
from ppctl.model.router import Router
from ppctl.model.stage_model import pieces
from ppctl.plan.build import build_plan
from ppctl.train import replica
from ppctl.train.session import Session, build_session
from ppctl.train.step import Trainer

STEPS, SEQ, MICROBATCHES, SAMPLES = 3, 16, 4, 2
"""Microbatches of the global batch, whatever dp is, of SAMPLES samples each."""

PACKED = ("packed", "packed, dropped")
"""Models whose rows hold several documents that do not see each other."""

SIZES = dict(num_layers=4, hidden_size=16, ffn_hidden_size=24, num_attention_heads=4, vocab_size=37)
"""The vocabulary divides by nothing."""

EXPERTS = dict(
    num_moe_experts=4,
    moe_router_topk=2,
    moe_ffn_hidden_size=8,
    moe_shared_expert_intermediate_size=12,
    moe_layer_freq="[0]+[1]*3",
    moe_z_loss_coeff=0.001,
    moe_aux_loss_coeff=0.01,
)

GPT3 = dict(
    normalization="LayerNorm",
    add_bias_linear=True,
    gated_linear_unit=False,
    position_embedding_type="learned_absolute",
    max_position_embeddings=SEQ,
    hidden_dropout=0.2,
    share_embeddings_and_output_weights=True,
)

MODELS: dict[str, dict[str, Any]] = {
    "grouped": dict(num_query_groups=2, qk_layernorm=True),
    "biases": dict(num_query_groups=4, add_qkv_bias=True, share_embeddings_and_output_weights=True),
    "experts": EXPERTS | dict(num_query_groups=2),
    "deepseek": EXPERTS
    | dict(
        multi_latent_attention=True,
        q_lora_rank=12,
        kv_lora_rank=8,
        qk_head_dim=4,
        qk_pos_emb_head_dim=4,
        v_head_dim=8,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=0.01,
        moe_router_load_balancing_type="seq_aux_loss",
        mtp_num_layers=1,
    ),
    "gpt3": GPT3 | dict(attention_dropout=0.1),
    "gpt3, all scores": GPT3,
    "packed": dict(num_query_groups=2, mtp_num_layers=1),
    "packed, dropped": dict(num_query_groups=2, attention_dropout=0.2),
    "latent": dict(
        multi_latent_attention=True,
        q_lora_rank=None,
        kv_lora_rank=8,
        qk_head_dim=4,
        qk_pos_emb_head_dim=4,
        v_head_dim=4,
        mtp_num_layers=2,
        share_embeddings_and_output_weights=True,
    ),
}


def config_of(kind: str, **axes: Any) -> RunConfig:
    """A run over these axes: tp, sp, cp, ep, etp, dp, pp, layout, and keys of any section."""
    config = RunConfig(model=ModelConfig(**SIZES, **MODELS[kind]))
    parallel = config.parallel
    names = dict(
        tp="tensor_model", cp="context", ep="expert_model", etp="expert_tensor", dp="data", pp="pipeline_model"
    )
    for short, long in names.items():
        setattr(parallel, f"{long}_parallel_size", axes.pop(short, None if short == "etp" else 1))
    parallel.sequence_parallel = axes.pop("sp", False)
    parallel.pipeline_model_parallel_layout = axes.pop("layout", None)
    parallel.params_dtype = axes.pop("params_dtype", "float64")
    parallel.overlap_p2p_comm, parallel.batch_p2p_comm, parallel.batch_p2p_sync = True, False, False
    parallel.deallocate_pipeline_outputs = True
    config.data.seq_length = SEQ
    config.train.steps, config.train.micro_batch_size = STEPS, SAMPLES
    config.train.global_batch_size = SAMPLES * MICROBATCHES
    config.optim.lr, config.optim.warmup_steps, config.optim.eps = 1e-3, 1, 1e-4
    config.optim.clip_grad = 0.1  # below every norm of these models: else no run would show how it clips
    config.launch.device = "cpu"
    config.data.reset_attention_mask = config.data.reset_position_ids = kind in PACKED
    config.model.cp_comm_type = axes.pop("ways", "p2p")
    parallel.hierarchical_context_parallel_sizes = axes.pop("levels", None)
    for key, value in axes.items():
        owner = next(o for o in (config.pipeline, config.train, config.optim, config.parallel) if hasattr(o, key))
        setattr(owner, key, value)
    return config


def world_of(config: RunConfig) -> int:
    """How many ranks it takes."""
    p = config.parallel
    sizes = (
        p.tensor_model_parallel_size,
        p.context_parallel_size,
        p.data_parallel_size,
        p.pipeline_model_parallel_size,
    )
    return math.prod(size or 1 for size in sizes)


@cache
def batch(step: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and mask of a step's global batch, [microbatches, samples, s]."""
    dice = torch.Generator().manual_seed(step)
    windows = torch.randint(vocabulary, (MICROBATCHES, SAMPLES, SEQ + 1), generator=dice)
    share = torch.rand(MICROBATCHES, SAMPLES, 1, generator=dice)
    mask = (torch.rand(MICROBATCHES, SAMPLES, SEQ, generator=dice) < share).float()
    mask[0, 0, -4:] = 1.0
    if step == 0:
        mask[-1] = 0.0
    return windows[..., :-1].contiguous(), windows[..., 1:].contiguous(), mask


def documents_of(step: int) -> tuple[tuple[int, ...], ...]:
    """Of every sample of a step's global batch the lengths of its documents: one to four."""
    dice = random.Random(step)
    rows = []
    for _ in range(MICROBATCHES * SAMPLES):
        ends = [*sorted(dice.sample(range(1, SEQ), dice.randrange(4))), SEQ]
        rows.append(tuple(end - first for first, end in zip([0, *ends], ends, strict=False)))
    return tuple(rows)


def positions_of(rows: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """[rows, s] int64, which restart in every document."""
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


class MaskedBatches:
    """The batches of one data-parallel rank."""

    def __init__(self, config: RunConfig, dp_rank: int) -> None:
        every = np.arange(MICROBATCHES * SAMPLES)
        self.own = torch.from_numpy(microbatches(every, SAMPLES, dp_rank, config.parallel.data_parallel_size or 1))
        self.vocabulary, self.packed = config.model.vocab_size, config.data.reset_attention_mask

    def step(self, step: int) -> StepBatch:
        """This rank's share."""
        tokens, labels, mask = batch(step, self.vocabulary)
        own = [whole.flatten(0, 1)[self.own] for whole in (tokens, labels, mask)]
        if not self.packed:
            return StepBatch(*own, total_tokens=int(mask.sum()), checksum=step)
        every = documents_of(step)
        documents = tuple(tuple(every[sample] for sample in row) for row in self.own.tolist())
        positions = positions_of(every)[self.own]
        return StepBatch(*own, int(mask.sum()), step, positions=positions, documents=documents)


def whole(session: Session, name: str, tensor: torch.Tensor) -> dict[str, np.ndarray]:
    """A parameter's tensor as one process has it, by the names of checkpoints. A collective."""
    row = session.model.rows[name]
    made = whole_of(session, name, tensor)
    experts = session.model.parts.experts(row.experts)
    named = {key: part.detach().numpy().copy() for key, part in pieces(name, made, row._replace(copy_of=None), experts)}
    return named


def train_all(mappings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs in a rank: each config's losses, norms, first gradients and last weights."""
    return in_own_worlds(lambda mapping: _train(from_mapping(mapping)), mappings)


def _train(config: RunConfig) -> dict[str, Any]:
    etp = "parallel.expert_tensor_parallel_size"
    plan = build_plan(config, {} if config.parallel.expert_tensor_parallel_size is None else {etp: "command line"})
    assert not plan.problems, plan.problems
    session = build_session(config, plan, dist.get_rank(), torch.device("cpu"))
    trainer = Trainer(session, MaskedBatches(config, session.own.dp_rank))  # type: ignore[arg-type]
    gradients: dict[str, np.ndarray] = {}
    scales: list[float] = []
    clip = replica.clip_gradients

    def keep(masters: Any, norm: Any, most: float) -> None:
        if not gradients:
            for name, master in masters.items():
                gradients.update(whole(session, name, master.grad))
        before = {name: master.grad.abs().max().item() for name, master in masters.items() if master.numel()}
        clip(masters, norm, most)
        largest = max(before, key=before.__getitem__)
        scales.append(masters[largest].grad.abs().max().item() / before[largest])

    with patch.object(replica, "clip_gradients", keep):
        records = [trainer.step(step).record for step in range(config.train.steps)]
    weights: dict[str, np.ndarray] = {}
    for name, master in session.replica.weights.master.items():
        weights.update(whole(session, name, master))
    for stage in session.model.stages.values():
        weights |= {name: buffer.numpy().copy() for name, buffer in stage.canonical_buffers().items()}
    session.pipeline.close()
    return {"records": records, "gradients": gradients, "weights": weights, "scales": scales}


@cache
def reference(kind: str, dtype: str = "float64", optimizer: str = "adamw") -> Any:
    """What one process makes of the model; asserts that no choice of experts hangs on a rounding."""
    config = config_of(kind, name=optimizer)
    steps = []
    for step in range(STEPS):
        tokens, labels, mask = batch(step, config.model.vocab_size)
        packings = [ROWS] * MICROBATCHES
        if kind in PACKED:
            every = documents_of(step)
            rows = [every[SAMPLES * mb : SAMPLES * (mb + 1)] for mb in range(MICROBATCHES)]
            packings = [Packing(positions_of(row), Documents(row)) for row in rows]
        steps.append(list(zip(tokens, labels, mask, packings, strict=True)))
    gaps: list[float] = []
    choose = Router._choose

    def watched(self: Router, scores: torch.Tensor) -> torch.Tensor:
        biased = scores if self.expert_bias is None else scores + self.expert_bias
        best = biased.sort(-1, descending=True).values
        topk = self.model.moe_router_topk
        gaps.append((best[..., topk - 1] - best[..., topk]).min().item())
        return choose(self, scores)

    with patch.object(Router, "_choose", watched):
        found = train_reference(
            config.model, config.optim, config.train.seed, steps, config.train.steps, dtype=getattr(torch, dtype)
        )
    assert min(gaps, default=1.0) > 1e-9
    return found


def far(ours: np.ndarray, theirs: np.ndarray, beside: np.ndarray | None = None) -> float:
    """The largest difference, relative to the larger of the largest entry and norm / sqrt(n) of theirs, or `beside`."""
    if not theirs.size:
        return 0.0
    sized = theirs if beside is None else beside
    scale = max(np.abs(sized).max(), np.linalg.norm(sized.ravel()) / math.sqrt(sized.size))
    return float(np.abs(ours - theirs).max() / scale) if scale else float(np.abs(ours).max())


def differences(
    kind: str, ranks: list[dict[str, Any]], dtype: str = "float64", optimizer: str = "adamw"
) -> dict[str, float]:
    """What -> the relative difference of any rank from one process."""
    expected = reference(kind, dtype, optimizer)
    found: dict[str, float] = {}

    def note(what: str, ours: Any, theirs: Any, beside: Any = None) -> None:
        found[what] = max(found.get(what, 0.0), far(np.asarray(ours), np.asarray(theirs), beside))

    for rank in ranks:
        records = rank["records"]
        note("loss", [r["loss"] for r in records], expected.losses)
        note("norm", [r["grad_norm"] for r in records], expected.norms)
        note("clip", rank["scales"], expected.scales)
        if any(expected.mtp_losses):
            note("mtp_loss", [r["mtp_loss"] for r in records], expected.mtp_losses)
        if any(expected.aux_losses):
            note("aux_loss", [r["aux_loss"] for r in records], expected.aux_losses)
    for kind_, theirs in (("gradients", expected.gradients), ("weights", expected.weights)):
        theirs = _named(theirs)
        seen: set[str] = set()
        for rank in ranks:
            for name, ours in rank[kind_].items():
                note(f"{kind_} {name}", ours, theirs[name], theirs[_size_of(kind, name)])
            seen |= rank[kind_].keys()
        assert seen == theirs.keys(), seen ^ theirs.keys()
    return found


def _size_of(kind: str, name: str) -> str:
    """The tensor whose size differences are relative to: a parameter whose gradient is zero has rounding alone."""
    without_gradient = kind.startswith("gpt3") and name.endswith(".wk.bias")  # it shifts all scores of a query alike
    return name.replace(".wk.", ".wq.") if without_gradient else name


def _named(tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Stacks of experts one by one, as checkpoints name them."""
    found = {}
    for name, tensor in tensors.items():
        owner, _, matrix = name.rpartition(".")
        if owner.endswith(".experts"):
            found |= {f"{owner}.{expert}.{matrix}.weight": part.numpy() for expert, part in enumerate(tensor)}
        else:
            found[name] = tensor.numpy()
    return found
