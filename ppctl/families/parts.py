"""Keys of config.json that are not one of ours each: positions, which layers have experts, groups of experts.

Knows Hugging Face's conventions, old and new. Must not know families or files. A `read_` function takes config.json
with its family's defaults filled in and gives values of ModelConfig, raising Unbuilt for what ppctl does not build; its
`write_` twin goes back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ppctl.config.schema import ModelConfig
from ppctl.geometry.moe_layer_freq import moe_layer_pattern

Json = Mapping[str, Any]

_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ORIGINAL = "original_max_position_embeddings"

POSITIONS = ("rope_scaling", "rope_parameters", _ORIGINAL)
"""Keys of config.json that say how positions are extended; a family's defaults have the rest."""

_LLAMA3 = {"beta_fast": "high_freq_factor", "beta_slow": "low_freq_factor"}


class Unbuilt(Exception):
    """A key of config.json and why ppctl does not build what it says."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key


def number(config: Json, key: str) -> Any:
    """A key's number. Raises KeyError where the key is missing, Unbuilt where its value is no number."""
    return _of_type(config, key, int | float, "a number")


def whole(config: Json, key: str) -> int:
    """A key's whole number from 0 on. Raises as `number`."""
    value: int = _of_type(config, key, int, "a whole number")
    if value < 0:
        raise Unbuilt(key, f"takes a whole number from 0 on, not {value}")
    return value


def _of_type(config: Json, key: str, kind: Any, words: str) -> Any:
    if isinstance(config[key], bool) or not isinstance(config[key], kind):
        raise Unbuilt(key, f"takes {words}, not {json.dumps(config[key])}")
    return config[key]


def read_rope(config: Json) -> dict[str, Any]:
    """Base and extension, from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    found = _positions(config)
    kind = found.get("rope_type", found.get("type", "default"))
    base = {"rotary_base": float(number({"rope_theta": config["rope_theta"], **found}, "rope_theta"))}
    if kind in ("default", None):
        return base
    if kind not in ("yarn", "llama3"):
        raise Unbuilt("rope_scaling", f"positions of type {kind} are not built; default, yarn and llama3 are")
    scaling = {_ORIGINAL: config["max_position_embeddings"], **found}
    if _ORIGINAL in config:
        scaling[_ORIGINAL] = config[_ORIGINAL]
    extension = {"rotary_scaling_type": kind, _ORIGINAL: whole(scaling, _ORIGINAL)}
    return base | extension | (_read_llama3(scaling) if kind == "llama3" else _read_yarn(config, scaling))


def _positions(config: Json) -> Json:
    """The mapping that counts, by transformers' rule (`RotaryEmbeddingConfigMixin`) where a file has both."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(found, Mapping) and not any(isinstance(value, Mapping) for value in found.values()):
        return found
    raise Unbuilt("rope_parameters", f"takes one mapping for all layers, not {json.dumps(found)}")


def _read_llama3(scaling: Json) -> dict[str, Any]:
    values = {ours: float(number(scaling, theirs)) for ours, theirs in _LLAMA3.items()}
    return {"rotary_scaling_factor": float(number(scaling, "factor")), **values}


def _read_yarn(config: Json, scaling: Json) -> dict[str, Any]:
    """What is missing, null or zero of `_YARN` keeps ppctl's default, which is the paper's, as in transformers."""
    for key, built in (("attention_factor", None), ("truncate", True)):
        if scaling.get(key, built) is not built:
            raise Unbuilt("rope_scaling", f"YaRN with {key}={scaling[key]} is not built")
    if bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")):
        raise Unbuilt("rope_scaling", "YaRN with only one of mscale and mscale_all_dim is not built")
    values = {key: float(number(scaling, key)) for key in _YARN if scaling.get(key)}
    if scaling["factor"] is None and scaling[_ORIGINAL]:
        # As in transformers: as many times longer as the longest sequence is than the original one.
        return {"rotary_scaling_factor": whole(config, "max_position_embeddings") / scaling[_ORIGINAL], **values}
    return {"rotary_scaling_factor": float(number(scaling, "factor")), **values}


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """As files of before transformers 5 have it: both read them."""
    scaling: dict[str, Any] | None = None
    if model.rotary_scaling_factor is not None and model.rotary_scaling_type == "llama3":
        scaling = {"rope_type": "llama3", "factor": model.rotary_scaling_factor}
        scaling |= {theirs: getattr(model, ours) for ours, theirs in _LLAMA3.items()}
        scaling[_ORIGINAL] = model.original_max_position_embeddings
    elif model.rotary_scaling_factor is not None:
        scaling = {"type": "yarn", "factor": model.rotary_scaling_factor}
        scaling |= {key: getattr(model, key) for key in (*_YARN, _ORIGINAL)}
        if not model.mscale_all_dim:
            del scaling["mscale"], scaling["mscale_all_dim"]
    return {"rope_theta": model.rotary_base, "rope_scaling": scaling}


def read_part_rope(config: Json) -> dict[str, Any]:
    """As `read_rope`, of a share of every head."""
    found = _positions(config)
    share = number({"partial_rotary_factor": config["partial_rotary_factor"], **found}, "partial_rotary_factor")
    return {**read_rope(config), "rotary_percent": float(share)}


def write_part_rope(model: ModelConfig) -> dict[str, Any]:
    """As `write_rope`, of a share of every head."""
    return {**write_rope(model), "partial_rotary_factor": model.rotary_percent}


def read_first_dense(config: Json) -> dict[str, Any]:
    """Routed and shared experts in all layers but the first ones."""
    layers, dense = whole(config, "num_hidden_layers"), whole(config, "first_k_dense_replace")
    if not config["n_routed_experts"] or dense >= layers:
        return {"num_moe_experts": None}
    shared = whole(config, "n_shared_experts") if config["n_shared_experts"] else 0
    return {
        "num_moe_experts": whole(config, "n_routed_experts"),
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": shared * whole(config, "moe_intermediate_size") or None,
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
        "moe_router_num_groups": whole(config, "n_group") if config["n_group"] else None,
        "moe_router_group_topk": whole(config, "topk_group") if config["topk_group"] else None,
        "moe_router_topk_scaling_factor": float(number(config, "routed_scaling_factor")),
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
    step = whole(config, "decoder_sparse_step")
    dense = _of_type(config, "mlp_only_layers", list | None, "a list of layers") or []
    if step == 0:
        raise Unbuilt("decoder_sparse_step", "takes a number from 1 on, not 0")
    moe = [int(i not in dense and (i + 1) % step == 0) for i in range(whole(config, "num_hidden_layers"))]
    return {"num_moe_experts": whole(config, "num_experts") or None, "moe_layer_freq": moe}


def write_sparse_step(model: ModelConfig) -> dict[str, Any]:
    """As a list of the dense layers."""
    dense = [i for i, moe in enumerate(moe_layer_pattern(model)) if not moe]
    return {"num_experts": model.num_moe_experts or 0, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def read_normalised(config: Json) -> dict[str, Any]:
    """Whether the chosen experts' weights add up to 1 (softmax over them) or are parts of a softmax over all."""
    return {"moe_router_pre_softmax": not config["norm_topk_prob"]}


def write_normalised(model: ModelConfig) -> dict[str, Any]:
    """The same, the other way round."""
    return {"norm_topk_prob": not model.moe_router_pre_softmax}


def read_divided(config: Json) -> dict[str, Any]:
    """Nothing of ours: several sigmoids are divided by their sum, a single one stays as it is (decision 24)."""
    several, divided = whole(config, "num_experts_per_tok") > 1, bool(config["norm_topk_prob"])
    if several == divided or read_first_dense(config)["num_moe_experts"] is None:
        return {}
    if several:
        raise Unbuilt("norm_topk_prob", "false is not built where a token goes to several experts")
    raise Unbuilt(
        "num_experts_per_tok",
        "1 with norm_topk_prob=true is read in two ways: transformers divides the one weight by itself, so that it is "
        "always 1, and Megatron and DeepSeek's own class leave it as it is. The second is built, and is what "
        "norm_topk_prob=false means to all of them",
    )


def write_divided(model: ModelConfig) -> dict[str, Any]:
    """The same, for the router that ppctl builds."""
    return {"norm_topk_prob": model.moe_router_topk > 1}


def read_mtp(config: Json) -> dict[str, Any]:
    """How many modules for multi-token prediction are stored."""
    return {"mtp_num_layers": whole(config, "num_nextn_predict_layers") if config["num_nextn_predict_layers"] else None}


def write_mtp(model: ModelConfig) -> dict[str, Any]:
    """Always written: transformers presumes one where the key is missing."""
    return {"num_nextn_predict_layers": model.mtp_num_layers or 0}
