"""Rules on values: what each key may hold, and what this release refuses by name. They report; they never mutate.

Knows single values and relations inside one section. Equations across sizes (world, batch, layout against pp) are the
plan's. Sources: the meaning of each key in `schema.py`; Megatron's constraints in `model_parallel_config.problems`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ppctl.config import batch_job, data_paths, decoder, messages, precision, recompute
from ppctl.config.keys import Finding, as_typed, did_you_mean, nearest, place_of, text_keys, value_of
from ppctl.config.model_parallel_config import problems as parallel_problems
from ppctl.config.schedules import ABSTRACT_SCHEDULES, SCHEDULES, schedule_policy
from ppctl.config.schema import OptimConfig, RunConfig
from ppctl.config.support import not_trained, refused
from ppctl.errors import Problem


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


POSITIVE = _names(
    "model.num_layers model.hidden_size model.ffn_hidden_size model.num_attention_heads model.num_query_groups "
    "model.kv_channels model.vocab_size model.max_position_embeddings model.rotary_base model.norm_epsilon "
    "model.q_lora_rank model.kv_lora_rank model.qk_head_dim model.qk_pos_emb_head_dim model.v_head_dim "
    "model.num_moe_experts model.moe_router_topk model.moe_ffn_hidden_size model.moe_shared_expert_intermediate_size "
    "model.moe_router_num_groups model.moe_router_group_topk model.moe_router_topk_scaling_factor "
    "model.rotary_scaling_factor model.rotary_percent model.original_max_position_embeddings model.beta_fast "
    "model.beta_slow parallel.tensor_model_parallel_size parallel.pipeline_model_parallel_size "
    "parallel.virtual_pipeline_model_parallel_size parallel.context_parallel_size parallel.expert_model_parallel_size "
    "parallel.expert_tensor_parallel_size parallel.data_parallel_size parallel.microbatch_group_size_per_vp_stage "
    "pipeline.pp_batch_size pipeline.p2p_capacity data.seq_length optim.lr optim.eps optim.loss_scale "
    "optim.initial_loss_scale optim.min_loss_scale optim.loss_scale_window optim.hysteresis "
    "train.steps train.global_batch_size train.micro_batch_size train.recompute_num_layers "
    "launch.nodes launch.gpus_per_node launch.cpus_per_task launch.signal_lead"
)

NOT_NEGATIVE = _names(
    "model.init_method_std model.moe_router_bias_update_rate model.moe_aux_loss_coeff model.moe_z_loss_coeff "
    "model.mscale model.mscale_all_dim model.mtp_num_layers model.mtp_loss_scaling_factor optim.min_lr "
    "optim.warmup_steps optim.weight_decay optim.clip_grad train.seed train.eval_interval train.eval_steps "
    "checkpoint.interval checkpoint.keep launch.max_requeues model.attention_dropout model.hidden_dropout "
    "cost.cublas_workspace_mib cost.te_workspace_mib"
)

MOST = 2**63 - 1

CHOICES = {
    "model.moe_router_score_function": ("softmax", "sigmoid"),
    "model.rotary_scaling_type": ("yarn", "llama3"),
    "model.moe_router_load_balancing_type": ("aux_loss", "seq_aux_loss", "none"),
    "model.normalization": ("RMSNorm", "LayerNorm"),
    "model.position_embedding_type": ("rope", "learned_absolute"),
    "model.attention_backend": ("auto", "fused", "flash", "unfused"),
    "parallel.data_parallel_sharding": ("none", "optimizer_gradients", "full"),
    "train.nonfinite": ("stop",),
    "cost.allocator": ("torch", "megatron", "megatron_te_2.11"),
    "launch.target": ("local", "slurm", "env"),
    "launch.device": ("cuda", "cpu", "any"),
    "launch.code": ("pinned", "live"),
}

OPTIONAL_CHOICES = {
    "cost.device": ("a100", "h100", "h800", "h200", "b200", "b300", "gb200", "gb300", "cpu"),
    "cost.matmul": ("fp8", "bf16"),
}
"""Or none. Those who price hold the same names: a test compares."""

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

NOT_EMPTY = (
    "model.from",
    "log.name",
    "log.dir",
    "data.path",
    "data.validation_path",
    "data.tokenizer",
    "checkpoint.resume",
    "cost.profile",
)

_NAME = re.compile(r"(?!\.+$)(?!\s)[^/\\\x00-\x1f\x7f]{1,100}(?<!\s)")
_MEMORY = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(KiB|MiB|GiB|TiB|KB|MB|GB|TB|B)?", re.ASCII)
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def check(
    config: RunConfig,
    provenance: Mapping[str, str],
    *,
    for_training: bool = False,
    skip: Collection[str] = (),
    usual: Mapping[str, Any] = MappingProxyType({}),
) -> list[Problem]:
    """Every rule that `config` breaks. `for_training` adds what can be planned but not trained yet, in one sentence.

    `skip` names keys whose value is known to be wrong already: no rule that reads them is told again. `usual` has the
    values that stood where the command line put others: remedies go back to them, and to the default elsewhere.
    """
    found = []
    told = set(skip)
    for keys, message, remedy in _findings(config, usual):
        if not set(keys) & set(skip):
            place = "\n".join(place_of(key, value_of(config, key), provenance) for key in keys)
            found.append(Problem("PP-E103", message, remedy, place))
            told.update(keys[:1])
    filled = replace(config.parallel, pipeline_dtype=config.parallel.pipeline_dtype or "float32")
    found += parallel_problems(filled)
    found += refused(config, provenance, told)
    if for_training:
        found += not_trained(config)
    return found


def memory_bytes(text: str) -> int:
    """Bytes of `80GiB`, `141 GB`, `1024`. Raises ValueError for anything else."""
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no amount of memory: a number and a unit, as 80GiB")
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def _findings(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _signs(config, usual)
    yield from _words(config, usual)
    yield from _environment(config.launch.env, usual)
    yield from decoder.broken_rules(config.model)
    yield from _optim(config.optim)
    yield from precision.broken_rules(config)
    yield from messages.broken_rules(config)
    yield from recompute.broken_rules(config)
    yield from data_paths.broken_rules(config)
    yield from batch_job.broken_rules(config)
    yield from _schedule(config)
    if config.train.micro_batch_size != config.pipeline.pp_microbatch_size != 1:
        keys = ("train.micro_batch_size", "pipeline.pp_microbatch_size")
        yield keys, "the two names of the micro batch size differ", f"mbs={config.train.micro_batch_size}"
    model, data = config.model, config.data
    given = config.pipeline.pp_seq_len
    if given is not None and given != data.seq_length:
        keys = ("pipeline.pp_seq_len", "data.seq_length")
        message = f"messages would be made for sequences of {given}, and the data's have {data.seq_length}"
        yield keys, message, f"pipeline.pp_seq_len={data.seq_length}"
    if data.seq_length > model.max_position_embeddings:
        yield (
            ("data.seq_length", "model.max_position_embeddings"),
            f"a sequence of {data.seq_length} is longer than the model's {model.max_position_embeddings} positions",
            f"model.max_position_embeddings={data.seq_length}",
        )


def _signs(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    for key in (*POSITIVE, *NOT_NEGATIVE):
        value, zero = value_of(config, key), key in NOT_NEGATIVE
        if value is None:
            continue
        if not (value > 0 or (zero and value == 0)):
            yield (key,), f"{key} must be {'0 or more' if zero else 'greater than 0'}", _back(key, usual, int(not zero))
        elif value > MOST:
            yield (key,), f"{key} must be at most {MOST}, the largest number of 64 bits", _back(key, usual, 1)


def _back(key: str, usual: Mapping[str, Any], otherwise: Any) -> str:
    """The override that goes back to what stood before, or to the default."""
    before = usual.get(key, text_keys()[key].default)
    return as_typed(key, otherwise if before is None else before)


def _words(config: RunConfig, usual: Mapping[str, Any]) -> Iterator[Finding]:
    optional = {key: choices for key, choices in OPTIONAL_CHOICES.items() if value_of(config, key) is not None}
    for key, choices in (CHOICES | optional).items():
        value = value_of(config, key)
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            close = nearest(str(value), choices)
            remedy = f"{key}={close[0]}" if close else _back(key, usual, choices[0])
            yield (key,), f"{key} is one of {', '.join(choices)}{hint}", remedy
    for key in NOT_EMPTY:
        if value_of(config, key) == "":
            yield (key,), f"{key} is empty", _back(key, usual, None)
    if config.log.name and not _NAME.fullmatch(config.log.name):
        message = "log.name is the name of a directory: up to 100 letters that can be printed, no slashes, not . or .."
        yield ("log.name",), message, _back("log.name", usual, "run")
    if config.launch.device_memory is not None:
        try:
            memory_bytes(config.launch.device_memory)
        except ValueError as error:
            yield ("launch.device_memory",), str(error), "launch.device_memory=80GiB"


def _environment(variables: Mapping[str, str], usual: Mapping[str, Any]) -> Iterator[Finding]:
    for name, value in variables.items():
        if name in RANK_VARIABLES:
            message = f"launch.env cannot set {name}: whoever starts the ranks says it to each of them"
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or "\0" in value:
            message = f"launch.env cannot set {name!r}: letters, digits and _ make the name of a variable"
        else:
            continue
        yield ("launch.env",), message, _back("launch.env", usual, {})


def _optim(optim: OptimConfig) -> Iterator[Finding]:
    for name in ("beta1", "beta2"):
        if not 0 <= getattr(optim, name) < 1:
            yield (f"optim.{name}",), f"optim.{name} is at least 0 and below 1", f"optim.{name}=0.9"
    if optim.min_lr > optim.lr > 0:
        yield (
            ("optim.min_lr", "optim.lr"),
            "the learning rate falls to min_lr, which is above lr",
            f"optim.min_lr={optim.lr}",
        )


def _schedule(config: RunConfig) -> Iterator[Finding]:
    name = config.pipeline.pp_schedule
    if config.pipeline.pp_schedule_csv is not None and name is None:
        return
    if schedule_policy(name) is None:
        abstract = (name or "").lower() in ABSTRACT_SCHEDULES
        hint = ": that is a kind of schedule" if abstract else did_you_mean(str(name), SCHEDULES)
        chunks = config.parallel.virtual_pipeline_model_parallel_size or 1
        close = [*nearest(str(name), SCHEDULES), "interleaved_1f1b" if chunks > 1 else "1f1b"]
        yield ("pipeline.pp_schedule",), f"there is no schedule {name}{hint}", f"pipeline.pp_schedule={close[0]}"
