"""Canonical names and Hugging Face's, as tables: one for all families, and the differences of some.

Knows names only. Must not know shapes, files or torch. `{expert}` stands for the index of an expert. MTP's modules
follow the decoder's layers there: module K of a model with N layers is `model.layers.{N+K}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

MODEL = {
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

LAYER = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "attention_norm": "input_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router": "mlp.gate",
    "moe.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "moe.experts.{expert}.w1": "mlp.experts.{expert}.gate_proj",
    "moe.experts.{expert}.w2": "mlp.experts.{expert}.down_proj",
    "moe.experts.{expert}.w3": "mlp.experts.{expert}.up_proj",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
    "ffn_norm": "post_attention_layernorm",
}
"""Module (or whole tensor) within a decoder layer; `.weight` and `.bias` stay as they are."""

LATENT = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
}
"""DeepSeek's families: names that differ, and modules that only they have."""

MIXTRAL = {
    "moe.router": "block_sparse_moe.gate",
    "moe.experts.{expert}.w1": "block_sparse_moe.experts.{expert}.w1",
    "moe.experts.{expert}.w2": "block_sparse_moe.experts.{expert}.w2",
    "moe.experts.{expert}.w3": "block_sparse_moe.experts.{expert}.w3",
}
"""Mixtral's names that differ."""

MTP = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm"}
"""Module within an MTP module; its decoder layer has the names of `LAYER`."""

MTP_COPIES = {"embed_tokens.weight": "tok_embeddings.weight", "shared_head.head.weight": "output.weight"}
"""Copies of the model's tables that every MTP module is stored with there: name within it -> what it is a copy of."""

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
_MTP = re.compile(r"mtp\.(\d+)\.(layer\.)?(.+)")


def stored_name(name: str, num_layers: int, own_names: Mapping[str, str]) -> str:
    """Hugging Face's name of a canonical tensor.

    `own_names` are the family's names that differ from `LAYER`. Raises KeyError for a name that is not canonical.
    """
    table = {**LAYER, **own_names}
    if name in MODEL:
        return MODEL[name]
    if found := _LAYER.fullmatch(name):
        return f"model.layers.{found[1]}.{_within(found[2], table)}"
    if found := _MTP.fullmatch(name):
        return f"model.layers.{num_layers + int(found[1])}.{_within(found[3], table if found[2] else MTP)}"
    raise KeyError(name)


def _within(name: str, table: Mapping[str, str]) -> str:
    if name in table:
        return table[name]
    module, _, kind = name.rpartition(".")
    expert = _EXPERT.search(module)
    if expert is not None:
        module = module.replace(expert[0], ".experts.{expert}.")
    return f"{table[module]}.{kind}".format(expert=expert and expert[1])


def mtp_copies(model_layers: int, depth: int) -> dict[str, str]:
    """Hugging Face's name of each copy that MTP module `depth` is stored with -> the canonical name of the original."""
    return {f"model.layers.{model_layers + depth}.{name}": of for name, of in MTP_COPIES.items()}
