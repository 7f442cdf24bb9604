"""Flags in Megatron's spelling: which of them ppctl takes, and what to say of the others.

Knows names only. Sizes, layout, batch and sequence are accepted as flags; everything else is written `KEY=VALUE`.
"""

from __future__ import annotations

from collections.abc import Iterable

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
    "--split": "data.validation_split=0.05",
    "--tensorboard-dir": "log.tensorboard=true",
    "--wandb-project": "log.wandb=true",
    "--untie-embeddings-and-output-weights": "model.share_embeddings_and_output_weights=false",
    "--nnodes": "launch.nodes",
    "--nproc-per-node": "launch.gpus_per_node",
}
"""Flags of others whose meaning a key carries: the key, or the override where the flag takes no value."""

LATER = frozenset(
    {
        "--overlap-grad-reduce",
        "--overlap-param-gather",
        "--fp8-format",
        "--fp8-recipe",
    }
)
"""Flags whose work a later release takes up."""

MEANINGLESS = {
    "--use-mcore-models": "ppctl has one implementation of its model",
    "--transformer-impl": "ppctl has one implementation of its model",
    "--swiglu": "the decoder's feed-forward is always SwiGLU",
    "--normalization": "the decoder's norm is always RMSNorm",
    "--position-embedding-type": "the decoder's positions are always RoPE",
    "--use-rotary-position-embeddings": "the decoder's positions are always RoPE",
    "--disable-bias-linear": "the decoder's matrices have no bias",
    "--group-query-attention": "model.num_query_groups alone says it",
    "--use-flash-attn": "attention is torch's scaled_dot_product_attention, which chooses its kernel",
    "--distributed-backend": "the device decides: nccl on cuda, gloo on cpu",
    "--log-interval": "every step is logged",
    "--save": "checkpoints are in the run directory: log.dir",
    "--node-rank": "ranks started by others say so in their environment",
    "--rdzv-backend": "ranks started by others say so in their environment",
    "--rdzv-endpoint": "ranks started by others say so in their environment",
}
"""Flags that have nothing to say here, and why."""


def flag_problem(flag: str, value: str = "", own: Iterable[str] = ()) -> Problem:
    """What is wrong with a flag that ppctl does not take; `value` is what was typed for it."""
    place = "command line"
    if flag in MEGATRON:
        usual = value_text(text_keys()[MEGATRON[flag]].default)
        return Problem("PP-E107", f"{flag} needs a value", f"{flag} {usual}", place)
    if flag in LISTS:
        return Problem("PP-E107", f"{flag} needs a value", f"ppctl explain {LISTS[flag]}", place)
    if flag in RENAMED:
        remedy = RENAMED[flag] if "=" in RENAMED[flag] else _override(RENAMED[flag], value)
        return Problem("PP-E107", f"{flag} is no flag of ppctl; the setting is a key", remedy, place)
    if flag in LATER:
        return Problem("PP-E108", f"{flag} comes in a later release; leave it out", place=place)
    if flag in MEANINGLESS:
        return Problem("PP-E109", f"{flag} means nothing here: {MEANINGLESS[flag]}; leave it out", place=place)
    field = flag.lstrip("-").replace("-", "_")
    same = [name for name in text_keys() if name.rpartition(".")[2] == field or name == field]
    if same:
        return Problem("PP-E107", f"{flag} is no flag of ppctl; the setting is a key", _override(same[0], value), place)
    known = [*own, *MEGATRON, *LISTS, *RENAMED]
    return Problem("PP-E107", f"there is no flag {flag}{did_you_mean(flag, known)}", "ppctl --help", place)


def _override(key: str, value: str) -> str:
    """`key=value`; of a flag without a value, what it switches on, or the key's default."""
    info = text_keys()[key]
    return as_typed(key, value or (True if isinstance(info.default, bool) else info.default))
