"""Where Megatron-core keeps each tensor of a model: its key in a `torch_dist` checkpoint, and the rows.

A tensor of ours is a run of rows of one of Megatron's, or some rows of every group of heads: queries, keys and values
are one matrix in Megatron, group by group, and the gate of a feed-forward comes before its other half. Source: the
sharded state dicts of Megatron-core 0.16 (`transformer/*.py`, without `ssm`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.schema import ModelConfig
from ppctl.families.directory import model_tensors

Shape = tuple[int, ...]


class RowBlock(NamedTuple):
    """Some rows of a tensor that consists of `groups` equal blocks: in each block, `size` rows from `first` on."""

    groups: int
    first: int
    size: int
    block: int
    """Rows of a block."""


class MegatronPlace(NamedTuple):
    """The place of one of ppctl's tensors in a Megatron checkpoint."""

    keys: tuple[str, ...]
    """Keys with one entry per layer: first the key that is written today, then alternatives for reading."""
    rows: RowBlock | None = None
    """Which rows of the stored tensor; None for all."""
    alone: str = ""
    """The suffix of the key if these rows are stored by themselves."""


MODEL = {
    "tok_embeddings.weight": "embedding.word_embeddings.weight",
    "position_embeddings.weight": "embedding.position_embeddings.weight",
    "norm.weight": "decoder.final_layernorm.weight",
    "norm.bias": "decoder.final_layernorm.bias",
    "output.weight": "output_layer.weight",
}

_ATTENTION = "self_attention"
_WHOLE = {
    "attention.wo": f"{_ATTENTION}.linear_proj",
    "attention.wq": f"{_ATTENTION}.linear_q_proj",
    "attention.wq_a": f"{_ATTENTION}.linear_q_down_proj",
    "attention.wq_b": f"{_ATTENTION}.linear_q_up_proj",
    "attention.wkv_a": f"{_ATTENTION}.linear_kv_down_proj",
    "attention.wkv_b": f"{_ATTENTION}.linear_kv_up_proj",
    "attention.k_norm": f"{_ATTENTION}.k_layernorm",
    "feed_forward.w2": "mlp.linear_fc2",
    "moe.router": "mlp.router",
    "moe.experts.{expert}.w2": "mlp.experts.experts.{expert}.linear_fc2",
    "moe.shared_experts.w2": "mlp.shared_experts.linear_fc2",
}
"""ppctl's module name within a layer -> Megatron's; `.weight` and `.bias` are unchanged."""

_NORMS = {
    "attention_norm": (f"{_ATTENTION}.linear_qkv.layer_norm_", "input_layernorm."),
    "ffn_norm": ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
}
"""Norm -> its key fused into the following linear layer, and its key as a separate module."""

_FIRST = {
    "feed_forward": "mlp.linear_fc1",
    "moe.experts.{expert}": "mlp.experts.experts.{expert}.linear_fc1",
    "moe.shared_experts": "mlp.shared_experts.linear_fc1",
}
"""Feed-forward -> its first product; with a gate w1 and w3 are its halves."""

_MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "final_layernorm"}
_EXPERT = re.compile(r"experts\.(\d+)\.")
_NUMBERED = re.compile(r"(layers|mtp)\.(\d+)\.(layer\.)?(.+)")
STACKED = re.compile(r"(decoder\.layers)\.(\d+)\.(.+)")
STACKED_EXPERT = re.compile(r"(.+\.experts\.experts)\.(\d+)\.(.+)")

SKIPPED = ("optimizer.", "chained_", "rng_state", "rerun_state_machine_state", "opt_param_scheduler", "param_groups")
"""Prefixes of keys that are no weights."""


def is_stacked(model: ModelConfig) -> bool:
    """Whether Megatron-core stacks the decoder's layers by default: if all are of one kind."""
    return len(set(moe_layer_pattern(model))) == 1


def places(model: ModelConfig) -> dict[str, MegatronPlace]:
    """Canonical name -> its place, for all of a model's tensors."""
    shapes = model_tensors(model)
    return {name: _place(name, shapes, model) for name in shapes}


def _place(name: str, shapes: Mapping[str, Shape], model: ModelConfig) -> MegatronPlace:
    shape = shapes[name]
    if name in MODEL:
        return MegatronPlace((MODEL[name],))
    match = _NUMBERED.fullmatch(name)
    assert match is not None, name
    if match[1] == "mtp" and not match[3]:
        module, _, kind = match[4].rpartition(".")
        return MegatronPlace((f"mtp.layers.{match[2]}.{_MTP[module]}.{kind}",))
    if match[1] == "mtp":
        prefixes = [f"mtp.layers.{match[2]}.{inner}." for inner in ("transformer_layer", "mtp_model_layer")]
    else:
        prefixes = [f"decoder.layers.{match[2]}."]
    moe = f"{name.removesuffix(match[4])}moe.router.weight" in shapes
    inner = _within(match[4], shape, model, moe)
    return inner._replace(keys=tuple(prefix + key for prefix in prefixes for key in inner.keys))


def _within(name: str, shape: Shape, model: ModelConfig, moe: bool) -> MegatronPlace:
    """Megatron's keys and rows of a tensor of a decoder layer; names and keys are relative to the layer."""
    module, _, kind = name.rpartition(".")
    if name == "moe.router.expert_bias":
        return MegatronPlace(("mlp.router.expert_bias",))
    if module in _NORMS:
        fused, alone = _NORMS[module]
        # A norm before experts or MLA's down-projections is stored by itself: no product has it fused.
        by_itself = moe if module == "ffn_norm" else model.multi_latent_attention
        keys = (f"{fused}{kind}", f"{alone}{kind}")
        return MegatronPlace(keys[::-1] if by_itself else keys)
    if module == "attention.q_norm":
        alone = f"{_ATTENTION}.q_layernorm.{kind}"
        fused = f"{_ATTENTION}.linear_q_up_proj.layer_norm_{kind}"
        return MegatronPlace((fused, alone) if model.multi_latent_attention else (alone,))
    if module == "attention.kv_norm":
        return MegatronPlace((f"{_ATTENTION}.linear_kv_up_proj.layer_norm_{kind}", f"{_ATTENTION}.kv_layernorm.{kind}"))
    if module in ("attention.wq", "attention.wk", "attention.wv") and not model.multi_latent_attention:
        return MegatronPlace((f"{_ATTENTION}.linear_qkv.{kind}",), _of_groups(module[-1], model))
    expert = _EXPERT.search(module)
    general = module.replace(expert[0], "experts.{expert}.") if expert else module
    if general.endswith((".w1", ".w3")):
        key = f"{_FIRST[general[:-3]]}.{kind}".format(expert=expert and expert[1])
        if not model.gated_linear_unit:
            return MegatronPlace((key,))
        first = general.endswith("1")
        half = RowBlock(1, 0 if first else shape[0], shape[0], 2 * shape[0])
        return MegatronPlace((key,), half, "_w" if first else "_v")
    return MegatronPlace((f"{_WHOLE[general]}.{kind}".format(expert=expert and expert[1]),))


def _of_groups(which: str, model: ModelConfig) -> RowBlock:
    """The rows of queries, keys or values: each group has its heads' queries, then its keys, then its values."""
    groups, head = model.query_groups, model.head_dim
    queries = model.num_attention_heads // groups * head
    first, count = {"q": (0, queries), "k": (queries, head), "v": (queries + head, head)}[which]
    return RowBlock(groups, first, count, queries + 2 * head)


def written(model: ModelConfig) -> dict[str, tuple[Shape, Mapping[str, RowBlock | None]]]:
    """Key (one per layer and expert) -> (its shape, our tensors in it -> their rows)."""
    shapes, matrices = model_tensors(model), dict[str, tuple[Shape, dict[str, RowBlock | None]]]()
    for name, place in places(model).items():
        shape = shapes[name]
        if place.rows is not None:
            shape = (place.rows.groups * place.rows.block, *shape[1:])
        # Norms have two keys, depending on the kind of Megatron-core's layers: both are written, as norms are small.
        for key in place.keys if len(shape) == 1 and name.startswith("layers.") else place.keys[:1]:
            matrices.setdefault(key, (shape, {}))[1][name] = place.rows
    return dict(matrices)
