"""Keys of config.json that are not one of ours each: positions, which layers have experts, groups of experts.

Knows Hugging Face's conventions, old and new. Must not know families or files. A `read_` function takes config.json and
gives values of ModelConfig, raising Unbuilt for what ppctl does not build; its `write_` twin goes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ppctl.config.schema import ModelConfig
from ppctl.cost.layers import moe_layer_pattern

Json = Mapping[str, Any]

_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "original_max_position_embeddings")

_LLAMA3 = {
    "beta_fast": "high_freq_factor",
    "beta_slow": "low_freq_factor",
    "original_max_position_embeddings": "original_max_position_embeddings",
}


class Unbuilt(Exception):
    """A key of config.json and why ppctl does not build what it says."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key


def read_rope(config: Json) -> dict[str, Any]:
    """Base and extension, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    found: Json = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = found.get("rope_type", found.get("type", "default"))
    base = {"rotary_base": float(found.get("rope_theta") or config.get("rope_theta") or 10000.0)}
    if kind in ("default", None):
        return base
    if kind == "llama3":
        given = {ours: found[theirs] for ours, theirs in _LLAMA3.items()}
        return {**base, "rotary_scaling_type": kind, "rotary_scaling_factor": float(found["factor"]), **given}
    if kind != "yarn":
        raise Unbuilt("rope_scaling", f"positions of type {kind} are not built; default, yarn and llama3 are")
    for key in ("attention_factor", "truncate"):
        if found.get(key) not in (None, {"truncate": True}.get(key)):
            raise Unbuilt("rope_scaling", f"YaRN with {key}={found[key]} is not built")
    if bool(found.get("mscale")) != bool(found.get("mscale_all_dim")):
        raise Unbuilt("rope_scaling", "YaRN with only one of mscale and mscale_all_dim is not built")
    given = {key: found[key] for key in _YARN if found.get(key)}
    return {**base, "rotary_scaling_factor": float(found["factor"]), **given}


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """As files of before transformers 5 have it: both read them."""
    scaling: dict[str, Any] | None = None
    if model.rotary_scaling_factor is not None and model.rotary_scaling_type == "llama3":
        scaling = {"rope_type": "llama3", "factor": model.rotary_scaling_factor}
        scaling |= {theirs: getattr(model, ours) for ours, theirs in _LLAMA3.items()}
    elif model.rotary_scaling_factor is not None:
        scaling = {"type": "yarn", "factor": model.rotary_scaling_factor, **{key: getattr(model, key) for key in _YARN}}
        if not model.mscale_all_dim:
            del scaling["mscale"], scaling["mscale_all_dim"]
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling}


def read_part_rope(config: Json) -> dict[str, Any]:
    """As `read_rope`, of a share of every head."""
    inner: Json = config.get("rope_parameters") or {}
    share: float = inner.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 0.5
    return {**read_rope(config), "rotary_percent": float(share)}


def write_part_rope(model: ModelConfig) -> dict[str, Any]:
    """As `write_rope`, of a share of every head."""
    return {**write_rope(model), "partial_rotary_factor": model.rotary_percent}


def read_first_dense(config: Json) -> dict[str, Any]:
    """Routed and shared experts in all layers but the first ones."""
    layers, total = config["num_hidden_layers"], config.get("n_routed_experts")
    dense = config.get("first_k_dense_replace", 0)
    if not total or dense >= layers:
        return {"num_moe_experts": None}
    shared = (config.get("n_shared_experts") or 0) * config["moe_intermediate_size"]
    return {
        "num_moe_experts": total,
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": shared or None,
    }


def write_first_dense(model: ModelConfig) -> dict[str, Any]:
    """The number of leading dense layers; a pattern that has others does not survive the way back."""
    if model.num_moe_experts is None:
        return {"first_k_dense_replace": model.num_layers}
    width = model.moe_ffn_hidden_size or model.ffn_hidden_size
    return {
        "n_routed_experts": model.num_moe_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // width,
        "first_k_dense_replace": moe_layer_pattern(model).count(False),
        "moe_layer_freq": 1,
    }


def read_groups(config: Json) -> dict[str, Any]:
    """Group-limited routing and the factor on the chosen experts' weights."""
    return {
        "moe_router_num_groups": config.get("n_group", 1),
        "moe_router_group_topk": config.get("topk_group", 1),
        "moe_router_topk_scaling_factor": config.get("routed_scaling_factor", 1.0),
    }


def write_groups(model: ModelConfig) -> dict[str, Any]:
    """With every value written out."""
    return {
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }


def read_sparse_step(config: Json) -> dict[str, Any]:
    """Experts in every step-th layer (counted from 1) that is not listed as dense."""
    step, dense = config.get("decoder_sparse_step", 1), set(config.get("mlp_only_layers") or ())
    layers = range(config["num_hidden_layers"])
    return {"moe_layer_freq": [int(i not in dense and (i + 1) % step == 0) for i in layers]}


def write_sparse_step(model: ModelConfig) -> dict[str, Any]:
    """As a list of the dense layers."""
    dense = [i for i, moe in enumerate(moe_layer_pattern(model)) if not moe]
    return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def read_normalised(config: Json) -> dict[str, Any]:
    """Whether the chosen experts' weights add up to 1 (softmax over them) or are parts of a softmax over all."""
    return {"moe_router_pre_softmax": not config.get("norm_topk_prob", False)}


def write_normalised(model: ModelConfig) -> dict[str, Any]:
    """The same, the other way round."""
    return {"norm_topk_prob": not model.moe_router_pre_softmax}
