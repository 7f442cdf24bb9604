"""`+scale=smoke` and `+scale=axes`: a recipe as a faithful miniature, which trains on a laptop.

Kinds of layers, schedule, MTP, routing rules, precision and every other switch stay. With `smoke` pp, vpp, layout and
numbers of layers stay as well, and ranks share no layer; with `axes` every axis of the recipe stays, two ranks long.
These values depend on each other, so they are not in the keys' metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from ppctl.config.argv import PLACE
from ppctl.config.keys import text_keys
from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.quantities import rollback_of
from ppctl.config.run_rules import WATCHED
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.schedule.policies import POLICIES, schedule_policy

KEEPS = {"smoke": "layout, layers and switches", "axes": "axes, kinds of layers and switches"}

HIDDEN = 64
HEADS = 4
EXPERTS = 8
EXPERT_WIDTH = 32
SEQUENCE = 64
VOCABULARY = 320
"""257 byte tokens and padding, as the smallest recipe has it."""
STEPS = 20
"""The most optimizer steps."""
WORK = 10_000
"""The most layers x microbatches of all steps: about two minutes on a two-core machine."""
LAYERS = 8
"""Decoder layers under `axes`: at most two for each of its 4 stages."""
AXIS = 2
"""The number of ranks along each axis."""


_LEFT_AT_DEFAULTS = (
    *("parallel.sequence_parallel", "parallel.hierarchical_context_parallel_sizes", "parallel.expert_dispatch"),
    *("data.path", "data.tokenizer", "data.format", "data.chat_template", "data.pack", "data.too_long"),
    *("data.text_key", "data.validation_path", "data.validation_split", "train.eval_interval", "train.eval_steps"),
    *("model.mtp_loss_scaling_pieces", "train.batch_rampup", "train.samples", "train.tokens"),
    *("train.epochs", "checkpoint.keep_best", "checkpoint.load", "checkpoint.resume", *WATCHED),
    *("optim.warmup_tokens", "optim.lr_decay_style", "optim.lr_decay_steps", "optim.lr_decay_tokens"),
    *("optim.lr_wsd_decay_steps", "optim.lr_pieces"),
    *("launch.nodes", "launch.gpus_per_node", "launch.device_memory", "launch.kubernetes.gpu"),
    *("cost.device", "cost.profile"),
)


def smoke(config: RunConfig, typed: Collection[str] = ()) -> dict[str, Any]:
    """The values, by key, that make `config` small; typed keys do not change others.

    One data-parallel replica of unshared layers; as many microbatches as pp, or as the schedule needs; at most two
    minutes of steps; small widths, with numbers of heads, experts, groups and chosen experts in proportion; bytes for
    tokens; a learning rate for a model of this size.
    """
    parallel, train = config.parallel, config.train
    values: dict[str, Any] = {f"model.{name}": value for name, value in _model(config.model).items()}
    for axis in ("tensor_model", "context", "expert_model"):
        values[f"parallel.{axis}_parallel_size"] = 1
    values |= {
        "parallel.data_parallel_size": 1,
        "parallel.expert_tensor_parallel_size": None if parallel.expert_tensor_parallel_size is None else 1,
        "data.seq_length": SEQUENCE,
        "pipeline.pp_seq_len": None if config.pipeline.pp_seq_len is None else SEQUENCE,
        **_batch(config, _microbatches(config), 1),
        "train.on_bad_step": "stop" if rollback_of(train.on_bad_step) else train.on_bad_step,
        "train.steps": steps(config, _microbatches(config)),
        "optim.lr": 2e-3,
        "optim.min_lr": 2e-4,
        "optim.warmup_steps": 0,
        "launch.device": "any",
        "checkpoint.interval": 0,
        "log.name": f"{config.log.name}_smoke",
    }
    return values | {name: text_keys()[name].default for name in _LEFT_AT_DEFAULTS}


def steps(config: RunConfig, num_microbatches: int) -> int:
    """The number of steps that takes about two minutes with the recipe's layers and microbatches."""
    model = config.model
    layers = model.num_layers + (model.mtp_num_layers or 0)
    return min(config.train.steps, STEPS, max(1, WORK // (layers * num_microbatches)))


def steps_in_words(config: RunConfig, provenance: Mapping[str, str]) -> Iterator[str]:
    """A note on a miniature's number of steps, and its reason."""
    model, train = config.model, config.train
    if not provenance.get("scale", "").startswith(PLACE) or provenance.get("train.steps", "").startswith(PLACE):
        return
    layers = model.num_layers + (model.mtp_num_layers or 0)
    microbatches = train.global_batch_size // train.micro_batch_size
    text = f"{train.steps} steps of {layers} layers x {microbatches} microbatch{'es' * (microbatches != 1)}"
    if train.steps < STEPS:
        text += f": at most {WORK:,} of these in all, which take about two minutes; steps={STEPS} overrides it"
    yield text


def _microbatches(config: RunConfig) -> int:
    pp = config.parallel.pipeline_model_parallel_size
    policy = POLICIES.get(schedule_policy(config.pipeline.pp_schedule) or "")
    return max(pp, policy.needs_microbatches(pp) if policy is not None else 1)


def axes(config: RunConfig, typed: Collection[str]) -> dict[str, Any]:
    """The values, by key, that make `config` small and cut every axis longer than 2 to 2: at most 16 processes.

    As `smoke`, but with at most 8 layers in the order of the recipe's kinds, as many replicas as the experts' ranks
    need, and 2 * pp microbatches, enough for every schedule. Experts with tensor parallelism get the sequence
    parallelism that they need. Typed sizes of axes stay, whatever number of processes they need.
    """
    parallel, model = config.parallel, config.model

    def size(axis: str) -> Any:
        name = f"{axis}_parallel_size"
        value = getattr(parallel, name)
        return value if value is None or f"parallel.{name}" in typed else min(value, AXIS)

    names = ("pipeline_model", "virtual_pipeline_model", "tensor_model", "context", "expert_model", "expert_tensor")
    pp, _, tp, cp, ep, etp = sizes = [size(axis) for axis in names]
    of_experts = ep * (tp if etp is None else etp)
    dp = parallel.data_parallel_size if "parallel.data_parallel_size" in typed else None
    dp = dp or of_experts // gcd(of_experts, tp * cp)
    kinds = moe_layer_pattern(model)
    layers = min(model.num_layers, LAYERS)
    freq = [int(kinds[layer * model.num_layers // layers]) for layer in range(layers)]
    values = smoke(config) | {f"parallel.{axis}_parallel_size": n for axis, n in zip(names, sizes, strict=True)}
    small = replace(config, model=replace(model, num_layers=layers))
    return values | {
        "train.steps": steps(small, 2 * pp * dp),
        "parallel.data_parallel_size": dp,
        "parallel.sequence_parallel": tp > 1 and (parallel.sequence_parallel or bool(model.num_moe_experts)),
        "parallel.pipeline_model_parallel_layout": None,
        "parallel.hierarchical_context_parallel_sizes": (cp > 1 and parallel.hierarchical_context_parallel_sizes)
        or None,
        "model.num_layers": layers,
        "model.moe_layer_freq": 1 if all(freq) or not model.num_moe_experts else freq,
        **_batch(config, 2 * pp, dp),
        "log.name": f"{config.log.name}_axes",
    }


def _batch(config: RunConfig, num_microbatches: int, dp: int) -> dict[str, int]:
    """The sizes of a batch in samples, for so many microbatches of each dp rank in one schedule call."""
    share = num_microbatches * config.train.micro_batch_size
    call = config.pipeline.pp_batch_size
    return {"train.global_batch_size": dp * share, "pipeline.pp_batch_size": call if call == 1 else share}


def _model(model: ModelConfig) -> dict[str, Any]:
    heads = min(model.num_attention_heads, HEADS)
    groups = model.num_query_groups
    values: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "ffn_hidden_size": _in_proportion(model.ffn_hidden_size, HIDDEN, model.hidden_size, 8),
        "num_attention_heads": heads,
        "num_query_groups": groups and _divisor(heads, _in_proportion(groups, heads, model.num_attention_heads)),
        "kv_channels": model.kv_channels and HIDDEN // HEADS,
        "vocab_size": VOCABULARY,
    }
    if model.multi_latent_attention:
        values |= {"q_lora_rank": model.q_lora_rank and 32, "kv_lora_rank": 16}
        values |= {"qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 16}
    if model.num_moe_experts is not None:
        values |= _experts(model, model.num_moe_experts)
    return values


def _experts(model: ModelConfig, experts: int) -> dict[str, Any]:
    """Values for 8 experts in groups of at least two, the same share of groups, and at least two chosen experts if the
    recipe chooses several."""
    count = min(experts, EXPERTS)
    shared = model.moe_shared_expert_intermediate_size
    groups, used = model.moe_router_num_groups, model.moe_router_group_topk
    kept = groups and _divisor(count, min(groups, count // 2))
    chosen = max(min(model.moe_router_topk, 2), _in_proportion(model.moe_router_topk, count, experts))
    return {
        "num_moe_experts": count,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": EXPERT_WIDTH,
        "moe_shared_expert_intermediate_size": shared and _in_proportion(shared, EXPERT_WIDTH, model.expert_width, 8),
        "moe_router_num_groups": kept,
        "moe_router_group_topk": used and kept and groups and _in_proportion(used, kept, groups),
    }


def _in_proportion(value: int, new: int, old: int, multiple: int = 1) -> int:
    """`value` x new / old, as the nearest multiple above 0."""
    return max(1, round(value * new / (old * multiple))) * multiple


def _divisor(number: int, at_most: int) -> int:
    return max(d for d in range(1, max(1, at_most) + 1) if number % d == 0)


SCALES: dict[str, Callable[[RunConfig, Collection[str]], dict[str, Any]]] = {"smoke": smoke, "axes": axes}
"""Scale -> the values, by key, that make a config small, given the keys that were typed."""
