"""Rules on the model: the decoder's sizes, and limits of models whose code is transformers'."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from ppctl.config.keys import Finding, as_typed
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.errors import Problem

_AXES = {
    "parallel.tensor_model_parallel_size": "multiplies with whole weights",
    "parallel.context_parallel_size": "attends to whole sequences",
    "parallel.expert_model_parallel_size": "holds all experts of a layer",
    "parallel.expert_tensor_parallel_size": "multiplies with whole weights",
}
_OTHERS = {
    "data.pack": (False, "takes a row for one conversation"),
    "data.reset_position_ids": (False, "counts positions through a row"),
    "data.reset_attention_mask": (False, "attends to whole rows"),
    "pipeline.patch_inner_model": (True, "does not take hidden states"),
    "pipeline.patch_causal_lm_model": (True, "does not take hidden states"),
    "parallel.cpu_offloading": (False, "keeps what masks and positions are made of outside its layers"),
}
READ = frozenset({"model.from", "model.implementation", "model.hf_overrides", "model.lora", "model.init_method_std"})
"""The keys of `model` that count for a model whose code is transformers'."""


def decoder(config: RunConfig) -> Iterator[Finding]:
    """Findings about the code that builds a model, and about the sizes of ppctl's own decoder."""
    model = config.model
    yield from _implementation(model)
    if model.transformers is not None:
        return  # its sizes are in transformers' config
    yield from _heads(model)
    if model.position_embedding_type == "learned_absolute" and model.mtp_num_layers:
        keys = ("model.position_embedding_type", "model.mtp_num_layers")
        message = "multi-token prediction needs rotary positions: it reads later tokens without their learned positions"
        yield keys, message, "model.position_embedding_type=rope"
    yield from _experts(model)
    kinds = model.cp_comm_type
    if not isinstance(kinds, str) and len(kinds) not in (1, model.num_layers):
        keys = ("model.cp_comm_type", "model.num_layers")
        message = f"cp_comm_type lists {len(kinds)} layers, but the model has {model.num_layers}"
        yield keys, message, "model.cp_comm_type=p2p"


def _implementation(model: ModelConfig) -> Iterator[Finding]:
    if model.transformers is not None:
        return
    takes = "model.implementation=transformers" if model.from_ else "model.from=DIR model.implementation=transformers"
    if model.implementation == "transformers" and model.from_ is None:
        message = "model.implementation=transformers needs a directory in model.from"
        yield ("model.implementation", "model.from"), message, "model.implementation=auto"
    elif model.hf_overrides and model.implementation != "transformers":
        message = "model.hf_overrides apply to models with transformers' code, but this one runs with ppctl's blocks"
        yield ("model.hf_overrides", "model.implementation"), message, takes
    elif model.lora and model.implementation != "transformers":  # else their obstacle is reported already
        message = "model.lora needs transformers' code, but this model runs with ppctl's blocks"
        yield ("model.lora", "model.implementation", "model.from"), message, takes


def turns_heads(model: ModelConfig) -> bool:
    """Whether positions are rotary: always in latent attention, as in Megatron, and also beside learned ones."""
    return model.multi_latent_attention or model.position_embedding_type == "rope"


def _heads(model: ModelConfig) -> Iterator[Finding]:
    heads, groups, latent = model.num_attention_heads, model.num_query_groups, model.multi_latent_attention
    keys = ("model.hidden_size", "model.num_attention_heads", "model.kv_channels")
    width = model.head_dim
    if not latent and model.kv_channels is None and model.hidden_size % heads:
        message = f"{heads} heads do not divide a hidden size of {model.hidden_size}"
        yield keys[:2], message, f"model.hidden_size={2 * heads * max(1, round(model.hidden_size / (2 * heads)))}"
    elif turns_heads(model) and not latent and width % 2:
        message = f"rotary positions rotate pairs: the width of a head must be even, not {width}"
        yield keys, message, f"model.kv_channels={width + 1}"
    elif turns_heads(model):
        yield from _rotary(model)
    if groups and heads % groups:
        fitting = max(g for g in range(1, min(groups, heads) + 1) if heads % g == 0)
        message = f"{groups} key/value heads cannot be shared evenly by {heads} heads"
        yield ("model.num_query_groups", keys[1]), message, f"model.num_query_groups={fitting}"


def _rotary(model: ModelConfig) -> Iterator[Finding]:
    head, share, width = model.head_dim, model.rotary_percent, model.qk_pos_emb_head_dim
    turned = int(head * share)
    if model.multi_latent_attention and width % 2:
        message = f"rotary positions rotate pairs: the width that they take must be even, not {width}"
        yield ("model.qk_pos_emb_head_dim",), message, f"model.qk_pos_emb_head_dim={width + 1}"
    elif not model.multi_latent_attention and (turned < 2 or turned % 2):
        message = f"rotary positions rotate pairs within a head: {share:g} of the width {head} must be even, above 0"
        fitting = 2 * min(max(round(turned / 2), 1), head // 2) / head
        yield ("model.rotary_percent",), message, f"model.rotary_percent={fitting:g}"
    if model.rotary_scaling_type == "llama3" and model.beta_fast <= model.beta_slow:
        message = "beta_fast must be above beta_slow: it begins the fast frequencies"
        yield ("model.beta_fast", "model.beta_slow"), message, f"model.beta_fast={4 * model.beta_slow:g}"
    if model.rotary_scaling_factor is not None and model.rotary_base <= 1:
        message = "YaRN separates fast frequencies from slow ones: the base must be above 1"
        yield ("model.rotary_base", "model.rotary_scaling_factor"), message, "model.rotary_base=10000"


def _experts(model: ModelConfig) -> Iterator[Finding]:
    experts = model.num_moe_experts
    if experts is None:
        return
    if model.moe_router_topk > experts:
        message = f"a token cannot go to {model.moe_router_topk} of {experts} experts"
        yield ("model.moe_router_topk", "model.num_moe_experts"), message, f"model.moe_router_topk={experts}"
    groups, chosen = model.moe_router_num_groups, model.moe_router_group_topk
    if groups and experts % groups:
        keys = ("model.moe_router_num_groups", "model.num_moe_experts")
        yield keys, f"{experts} experts do not make {groups} equal groups", "model.moe_router_num_groups=1"
    if chosen and chosen > (groups or 1):
        keys = ("model.moe_router_group_topk", "model.moe_router_num_groups")
        yield keys, f"{chosen} of {groups or 1} groups cannot be chosen", f"model.moe_router_group_topk={groups or 1}"
    elif chosen and groups and experts % groups == 0 and model.moe_router_topk > chosen * experts // groups:
        keys = ("model.moe_router_topk", "model.moe_router_group_topk")
        message = f"{chosen} of {groups} groups have {chosen * experts // groups} experts, but a token goes to"
        needed = -(-model.moe_router_topk * groups // experts)
        yield keys, f"{message} {model.moe_router_topk}", f"model.moe_router_group_topk={needed}"


def foreign(config: RunConfig) -> Iterator[Finding]:
    """Findings about axes and switches that a model whose code is transformers' does not support."""
    if config.model.transformers is None:
        return
    code = "a model whose code is transformers'"
    for key, why in _AXES.items():
        size = config[key]
        if size is not None and size > 1:
            yield (key,), f"{code} {why}: {key} must be 1, not {size}", f"{key}=1"
    for key, (fitting, why) in _OTHERS.items():
        if config[key] != fitting:
            yield (key,), f"{code} {why}: {key} must be {str(fitting).lower()}", as_typed(key, fitting)
    if config.train.recompute_granularity == "selective":
        key = "train.recompute_granularity"
        yield (key,), f"{code} has modules with other names: only whole layers can be recomputed", f"{key}=full"
    elif config.train.recompute_method != "block" and (config.train.recompute_num_layers or 1) > 1:
        key = "train.recompute_num_layers"
        yield (key,), f"{code} calls its layers itself: each is recomputed alone", f"{key}=1"


def without_effect(
    typed: Mapping[str, Any], fitting: Mapping[str, Any], place: str, read: Collection[str]
) -> list[Problem]:
    """The problems of values of `model` typed for a model whose code is transformers', because its config.json sets
    them, or nothing reads them. `fitting` has the right value of each key, `read` the keys that do count."""
    return [
        Problem(
            "PP-E103",
            f"{name} has no effect on a model whose code is transformers': its config.json says what it is",
            as_typed(name, fitting[name]),
            f"{name} = {value} ({place})",
        )
        for name, value in typed.items()
        if name.startswith("model.") and name not in read and value != fitting[name]
    ]
