"""Flags in Megatron's spelling: which of them ppctl takes, and what to say of the others.

Knows names only. Sizes, layout, batch and sequence are accepted as flags; everything else is written `KEY=VALUE`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ppctl.config.keys import as_typed, did_you_mean, text_keys, value_text
from ppctl.errors import Problem

_PARALLEL = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "pipeline_model_parallel_layout",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_MODEL = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "max_position_embeddings",
    "mtp_num_layers",
)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


MEGATRON = {
    **{_flag(name): f"parallel.{name}" for name in _PARALLEL},
    **{_flag(name): f"model.{name}" for name in _MODEL},
    "--num-virtual-stages-per-pipeline-rank": "parallel.virtual_pipeline_model_parallel_size",
    "--microbatch-group-size-per-virtual-pipeline-stage": "parallel.microbatch_group_size_per_vp_stage",
    "--num-layers-per-virtual-pipeline-stage": "parallel.num_layers_per_virtual_pipeline_stage",
    "--decoder-first-pipeline-num-layers": "parallel.num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "parallel.num_layers_in_last_pipeline_stage",
    "--num-experts": "model.num_moe_experts",
    "--micro-batch-size": "train.micro_batch_size",
    "--global-batch-size": "train.global_batch_size",
    "--seq-length": "data.seq_length",
    "--recompute-granularity": "train.recompute_granularity",
    "--recompute-method": "train.recompute_method",
    "--recompute-num-layers": "train.recompute_num_layers",
}
"""Flag -> key. Each takes one value, as `--flag VALUE` or `--flag=VALUE`."""

LISTS = {"--recompute-modules": "train.recompute_modules"}
"""Flag -> key. Each takes one value or more, as `--flag VALUE VALUE`."""

SWITCHES = {
    _flag(name): f"parallel.{name}"
    for name in ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
} | {_flag(name): f"data.{name}" for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")}
"""Flag -> key that it sets to true. They take no value."""

RENAMED = {
    "--train-iters": "train.steps",
    "--lr": "optim.lr",
    "--min-lr": "optim.min_lr",
    "--lr-warmup-iters": "optim.warmup_steps",
    "--weight-decay": "optim.weight_decay",
    "--adam-beta1": "optim.beta1",
    "--adam-beta2": "optim.beta2",
    "--adam-eps": "optim.eps",
    "--clip-grad": "optim.clip_grad",
    "--recompute-activations": "train.recompute_granularity=selective",
    "--seed": "train.seed",
    "--save-interval": "checkpoint.interval",
    "--load": "checkpoint.resume",
    "--bf16": "parallel.bf16=true",
    "--fp16": "parallel.fp16=true",
    "--use-distributed-optimizer": "parallel.data_parallel_sharding=optimizer_gradients",
    "--use-torch-fsdp2": "parallel.data_parallel_sharding=full",
    "--data-parallel-sharding-strategy": "parallel.data_parallel_sharding",
    "--loss-scale": "optim.loss_scale",
    "--initial-loss-scale": "optim.initial_loss_scale",
    "--min-loss-scale": "optim.min_loss_scale",
    "--loss-scale-window": "optim.loss_scale_window",
    "--hysteresis": "optim.hysteresis",
    "--deterministic-mode": "parallel.deterministic_mode=true",
    "--data-path": "data.path",
    "--valid-data-path": "data.validation_path",
    "--eval-iters": "train.eval_steps",
    "--tokenizer-model": "data.tokenizer",
    "--split": "data.validation_split",
    "--tensorboard-dir": "log.tensorboard=true",
    "--wandb-project": "log.wandb=true",
    "--swiglu": "model.gated_linear_unit=true",
    "--disable-bias-linear": "model.add_bias_linear=false",
    "--use-rotary-position-embeddings": "model.position_embedding_type=rope",
    "--untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights=false",
    "--nnodes": "launch.nodes",
    "--nproc-per-node": "launch.gpus_per_node",
}
"""Flags of others whose meaning a key carries: the key, or the override where the flag takes no value."""

SEVERAL = ("--data-path", "--valid-data-path")
"""Flags of others that take one value or more."""

LATER = frozenset(
    {
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--fp8-format",
        "--fp8-recipe",
    }
)
"""Flags whose work a later release takes up."""

_ATTENTION = "attention is torch's scaled_dot_product_attention, which chooses its kernel"

MEANINGLESS = {
    "--use-mcore-models": "ppctl has one implementation of its model",
    "--transformer-impl": "ppctl has one implementation of its model",
    "--group-query-attention": "model.num_query_groups alone says it",
    "--use-flash-attn": _ATTENTION,
    "--attention-softmax-in-fp32": _ATTENTION,
    "--no-masked-softmax-fusion": _ATTENTION,
    "--lr-decay-style": "the learning rate warms up linearly and decays as a cosine",
    "--tokenizer-type": "data.tokenizer alone says it",
    "--distributed-backend": "the device decides: nccl on cuda, gloo on cpu",
    "--log-interval": "every step is logged",
    "--save": "checkpoints are in the run directory: log.dir",
    "--node-rank": "ranks started by others say so in their environment",
    "--rdzv-backend": "ranks started by others say so in their environment",
    "--rdzv-endpoint": "ranks started by others say so in their environment",
}
"""Flags that have nothing to say here, and why."""


ELSEWHERE = {
    "max_steps": "train.steps",
    "learning_rate": "optim.lr",
    "precision": "parallel.bf16",
    "seq_len": "data.seq_length",
    "local_batch_size": "train.micro_batch_size",
    "tensor_parallel_degree": "parallel.tensor_model_parallel_size",
    "pipeline_parallel_degree": "parallel.pipeline_model_parallel_size",
    "context_parallel_degree": "parallel.context_parallel_size",
    "expert_parallel_degree": "parallel.expert_model_parallel_size",
    "output_dir": "log.dir",
    "runs_dir": "log.dir",
}
"""What NeMo, torchtitan and people call a key: the last part of the name."""


def meant_by(name: str) -> str | None:
    """The key for which other systems, Megatron's flags included, have `name` (its last part)."""
    found = ELSEWHERE.get(name) or RENAMED.get(_flag(name))
    return found.partition("=")[0] if found else None


class Foreign(NamedTuple):
    """A flag of Megatron's that ppctl understands and does not take."""

    typed: str
    override: str
    """What says the same; empty where nothing has to be said."""
    why: str
    """Why it is left out."""


def foreign(flag: str, value: str) -> Foreign | None:
    """What `flag value` comes to, or None where ppctl does not know the flag."""
    typed = shlex.join([flag, value] if value else [flag])
    if flag in RENAMED:
        value = _TRANSLATED[flag](value) if flag in _TRANSLATED else value
        override = RENAMED[flag] if "=" in RENAMED[flag] else _override(RENAMED[flag], value)
        return Foreign(typed, override, "")
    if flag in LATER:
        return Foreign(typed, "", "it comes in a later release")
    if flag in MEANINGLESS:
        return Foreign(typed, "", MEANINGLESS[flag])
    field = flag.lstrip("-").replace("-", "_")
    same = [name for name in text_keys() if name.rpartition(".")[2] == field or name == field]
    return Foreign(typed, _override(same[0], value), "") if same else None


def _validation_share(split: str) -> str:
    """The share of the second of Megatron's three numbers (training, validation, test), such as `949,50,1`."""
    try:
        shares = [float(part) for part in split.split(",")]
        return f"{shares[1] / sum(shares):.4g}"
    except (ValueError, IndexError, ZeroDivisionError):
        return split


def _shared_out(strategy: str) -> str:
    """What is sharded, by Megatron-FSDP's names."""
    names = {"no_shard": "none", "optim": "optimizer_gradients", "optim_grads": "optimizer_gradients"}
    return {**names, "optim_grads_params": "full"}.get(strategy, strategy)


_TRANSLATED = {"--split": _validation_share, "--data-parallel-sharding-strategy": _shared_out}
"""Flags whose values have other names here."""


def flags_problem(flags: Sequence[Foreign], line: str) -> Problem:
    """One problem for several flags at once; `line` is the command line with their keys in their place."""
    width = max(len(one.typed) for one in flags)
    rows = [f"{one.typed:<{width}}  {one.override or f'left out: {one.why}'}" for one in flags]
    message = f"{len(flags)} flags are keys here or say nothing here; the whole line in ppctl's words is below"
    return Problem("PP-E107", message, line, "\n".join(rows))


def flag_problem(flag: str, value: str = "", own: Iterable[str] = ()) -> Problem:
    """What is wrong with a flag that ppctl does not take; `value` is what was typed for it."""
    place = "command line"
    if flag in MEGATRON:
        usual = value_text(text_keys()[MEGATRON[flag]].default)
        return Problem("PP-E107", f"{flag} needs a value", f"{flag} {usual}", place)
    if flag in LISTS:
        return Problem("PP-E107", f"{flag} needs a value", f"ppctl explain {LISTS[flag]}", place)
    found = foreign(flag, value)
    if found is not None and found.override:
        return Problem("PP-E107", f"{flag} is no flag of ppctl; the setting is a key", found.override, place)
    if flag in LATER:
        return Problem("PP-E108", f"{flag} comes in a later release; leave it out", place=place)
    if flag in MEANINGLESS:
        return Problem("PP-E109", f"{flag} means nothing here: {MEANINGLESS[flag]}; leave it out", place=place)
    known = [*own, *MEGATRON, *LISTS, *RENAMED]
    return Problem("PP-E107", f"there is no flag {flag}{did_you_mean(flag, known)}", "ppctl --help", place)


def _override(key: str, value: str) -> str:
    """`key=value`; of a flag without a value, what it switches on, or the key's default."""
    info = text_keys()[key]
    return as_typed(key, value or (True if isinstance(info.default, bool) else info.default))
