"""Conversions between keys of config.json and of ModelConfig that are not one to one: positions, experts.

A `_read_` function takes config.json with its family's defaults filled in and returns values of ModelConfig, or raises
Unbuilt for what ppctl does not build; the `_write_` function of the same name is its inverse.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.schema import ModelConfig

Json = Mapping[str, Any]

_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ORIGINAL = "original_max_position_embeddings"

POSITIONS = ("rope_scaling", "rope_parameters", _ORIGINAL)
"""Keys of config.json about the extension of positions, which no family's defaults have."""

_LLAMA3 = {"beta_fast": "high_freq_factor", "beta_slow": "low_freq_factor"}


Conversion = tuple[Callable[[Json], dict[str, Any]], Callable[[ModelConfig], dict[str, Any]]]
"""(read, write): functions that convert several keys of config.json into several of ours, and back."""


class Unbuilt(Exception):
    """A key of config.json whose value ppctl does not build, and why."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(f"{key}: {why}")
        self.key = key


def number(config: Json, key: str) -> Any:
    """A key's number. Raises KeyError if the key is missing, Unbuilt if its value is no number."""
    return _of_type(config, key, int | float, "a number")


def whole(config: Json, key: str) -> int:
    """A key's whole number. Raises as `number`, and Unbuilt for a number below 0."""
    value: int = _of_type(config, key, int, "a whole number")
    if value < 0:
        raise Unbuilt(key, f"takes a whole number from 0 on, not {value}")
    return value


def _of_type(config: Json, key: str, kind: Any, words: str) -> Any:
    if isinstance(config[key], bool) or not isinstance(config[key], kind):
        raise Unbuilt(key, f"takes {words}, not {json.dumps(config[key])}")
    return config[key]


def _read_rope(config: Json) -> dict[str, Any]:
    """Read base and extension of positions: `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling`."""
    rope = _positions(config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    base = {"rotary_base": float(number({"rope_theta": config["rope_theta"], **rope}, "rope_theta"))}
    if kind in ("default", None):
        return base
    if kind not in ("yarn", "llama3"):
        raise Unbuilt("rope_scaling", f"positions of type {kind} are not built; default, yarn and llama3 are")
    scaling = {_ORIGINAL: config["max_position_embeddings"], **rope}
    if _ORIGINAL in config:
        scaling[_ORIGINAL] = config[_ORIGINAL]
    extension = {"rotary_scaling_type": kind, _ORIGINAL: whole(scaling, _ORIGINAL)}
    return base | extension | (_read_llama3(scaling) if kind == "llama3" else _read_yarn(config, scaling))


def _positions(config: Json) -> Json:
    """The mapping that takes effect, by transformers' rule (`RotaryEmbeddingConfigMixin`) if a file has two of them."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if isinstance(rope, Mapping) and not any(isinstance(value, Mapping) for value in rope.values()):
        return rope
    raise Unbuilt("rope_parameters", f"takes one mapping for all layers, not {json.dumps(rope)}")


def _read_llama3(scaling: Json) -> dict[str, Any]:
    values = {ours: float(number(scaling, theirs)) for ours, theirs in _LLAMA3.items()}
    return {"rotary_scaling_factor": float(number(scaling, "factor")), **values}


def _read_yarn(config: Json, scaling: Json) -> dict[str, Any]:
    """Read YaRN's sizes. Those in `_YARN` that are missing, null or zero get the paper's defaults."""
    for key, built in (("attention_factor", None), ("truncate", True)):
        if scaling.get(key, built) is not built:
            raise Unbuilt("rope_scaling", f"YaRN with {key}={scaling[key]} is not built")
    if bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")):
        raise Unbuilt("rope_scaling", "YaRN with only one of mscale and mscale_all_dim is not built")
    values = {key: float(number(scaling, key)) for key in _YARN if scaling.get(key)}
    if scaling["factor"] is None and scaling[_ORIGINAL]:
        # As in transformers: the ratio of the longest sequence to the original one.
        return {"rotary_scaling_factor": whole(config, "max_position_embeddings") / scaling[_ORIGINAL], **values}
    return {"rotary_scaling_factor": float(number(scaling, "factor")), **values}


def _write_rope(model: ModelConfig) -> dict[str, Any]:
    """Write positions in the form before transformers 5, which all versions read."""
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


def _read_part_rope(config: Json) -> dict[str, Any]:
    rope = _positions(config)
    share = number({"partial_rotary_factor": config["partial_rotary_factor"], **rope}, "partial_rotary_factor")
    return {**_read_rope(config), "rotary_percent": float(share)}


def _write_part_rope(model: ModelConfig) -> dict[str, Any]:
    return {**_write_rope(model), "partial_rotary_factor": model.rotary_percent}


def _read_first_dense(config: Json) -> dict[str, Any]:
    layers, dense = whole(config, "num_hidden_layers"), whole(config, "first_k_dense_replace")
    if not config["n_routed_experts"] or dense >= layers:
        return {"num_moe_experts": None}
    shared = whole(config, "n_shared_experts") if config["n_shared_experts"] else 0
    return {
        "num_moe_experts": whole(config, "n_routed_experts"),
        "moe_layer_freq": [0] * dense + [1] * (layers - dense),
        "moe_shared_expert_intermediate_size": shared * whole(config, "moe_intermediate_size") or None,
    }


def _write_first_dense(model: ModelConfig) -> dict[str, Any]:
    """The number of leading dense layers; `write_config` notices a pattern with other dense layers."""
    if model.num_moe_experts is None:
        return {"first_k_dense_replace": model.num_layers}
    return {
        "n_routed_experts": model.num_moe_experts,
        "n_shared_experts": (model.moe_shared_expert_intermediate_size or 0) // model.expert_width,
        "first_k_dense_replace": moe_layer_pattern(model).count(False),
        "moe_layer_freq": 1,
    }


def _read_groups(config: Json) -> dict[str, Any]:
    return {
        "moe_router_num_groups": whole(config, "n_group") if config["n_group"] else None,
        "moe_router_group_topk": whole(config, "topk_group") if config["topk_group"] else None,
        "moe_router_topk_scaling_factor": float(number(config, "routed_scaling_factor")),
    }


def _write_groups(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_group": model.moe_router_num_groups or 1,
        "topk_group": model.moe_router_group_topk or 1,
        "routed_scaling_factor": model.moe_router_topk_scaling_factor or 1.0,
    }


def _read_sparse_step(config: Json) -> dict[str, Any]:
    """Experts in every step-th layer (counted from 1) that is not listed as dense."""
    step = whole(config, "decoder_sparse_step")
    dense = _of_type(config, "mlp_only_layers", list | None, "a list of layers") or []
    if step == 0:
        raise Unbuilt("decoder_sparse_step", "takes a number from 1 on, not 0")
    moe = [int(i not in dense and (i + 1) % step == 0) for i in range(whole(config, "num_hidden_layers"))]
    return {"num_moe_experts": whole(config, "num_experts") or None, "moe_layer_freq": moe}


def _write_sparse_step(model: ModelConfig) -> dict[str, Any]:
    dense = [i for i, moe in enumerate(moe_layer_pattern(model)) if not moe]
    return {"num_experts": model.num_moe_experts or 0, "decoder_sparse_step": 1, "mlp_only_layers": dense}


def _read_divided(config: Json) -> dict[str, Any]:
    """Return nothing, or raise Unbuilt: ppctl divides several sigmoids by their sum, not a single one (decision 24)."""
    several, divided = whole(config, "num_experts_per_tok") > 1, bool(config["norm_topk_prob"])
    if several == divided or _read_first_dense(config)["num_moe_experts"] is None:
        return {}
    if several:
        raise Unbuilt("norm_topk_prob", "false is not built where a token goes to several experts")
    raise Unbuilt(
        "num_experts_per_tok",
        "1 with norm_topk_prob=true is read in two ways: transformers divides the one weight by itself, so that it is "
        "always 1, but Megatron and DeepSeek's own class leave it as it is. The second is built, and is what "
        "norm_topk_prob=false means to all of them",
    )


def _write_divided(model: ModelConfig) -> dict[str, Any]:
    return {"norm_topk_prob": model.moe_router_topk > 1}


ROPE: Conversion = (_read_rope, _write_rope)
PART_ROPE: Conversion = (_read_part_rope, _write_part_rope)
FIRST_DENSE: Conversion = (_read_first_dense, _write_first_dense)
GROUPS: Conversion = (_read_groups, _write_groups)
SPARSE_STEP: Conversion = (_read_sparse_step, _write_sparse_step)
DIVIDED: Conversion = (_read_divided, _write_divided)
