"""The families, one row each: their fields in config.json, and their names of tensors.

Sources: the public config.json of each family's models, and the defaults of the classes in transformers that read them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import not_
from types import MappingProxyType
from typing import Any, NamedTuple

from ppctl.families.conversions import DIVIDED, FIRST_DENSE, GROUPS, PART_ROPE, ROPE, SPARSE_STEP, Conversion

# Names of tensors. `{expert}` stands for the index of an expert. MTP's modules follow the decoder's layers: module K of
# a model with N layers is `model.layers.{N+K}`.

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
"""DeepSeek's families: different names, and modules that only they have."""

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
"""Copies of tables in DeepSeek's stored MTP modules: name within the module -> the original."""

_EXPERT_NAME = re.compile(r"\.experts\.(\d+)\.")
_LAYER_NAME = re.compile(r"layers\.(\d+)\.(.+)")
_MTP_NAME = re.compile(r"mtp\.(\d+)\.(layer\.)?(.+)")


def stored_name(name: str, num_layers: int, own_names: Mapping[str, str]) -> str:
    """Hugging Face's name of a canonical tensor. `own_names` are the family's names that differ from `LAYER`. Raises
    KeyError for a name that is not canonical."""
    table = {**LAYER, **own_names}
    if name in MODEL:
        return MODEL[name]
    if match := _LAYER_NAME.fullmatch(name):
        return f"model.layers.{match[1]}.{_within(match[2], table)}"
    if match := _MTP_NAME.fullmatch(name):
        return f"model.layers.{num_layers + int(match[1])}.{_within(match[3], table if match[2] else MTP)}"
    raise KeyError(name)


def _within(name: str, table: Mapping[str, str]) -> str:
    """The other format's name of a layer's tensor: from its own row in `table`, or its module's."""
    if name in table:
        return table[name]
    module, _, kind = name.rpartition(".")
    expert = _EXPERT_NAME.search(module)
    if expert is not None:
        module = module.replace(expert[0], ".experts.{expert}.")
    return f"{table[module]}.{kind}".format(expert=expert and expert[1])


# Families


class Field(NamedTuple):
    """One key of config.json that corresponds to one of ours."""

    theirs: str
    ours: str
    nullable: bool = False
    """Whether null means something else than leaving the key out."""
    read: Callable[[Any], Any] = lambda value: value
    """Our value from theirs."""
    write: Callable[[Any], Any] = lambda value: value
    """Their value from ours."""


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model."""

    model_type: str
    architecture: str
    """transformers' class, as config.json names it."""
    implied: Mapping[str, Any]
    """Our key -> the value that every model of the family has."""
    defaults: Mapping[str, Any]
    """Key of config.json -> its value if a file lacks it: the default of transformers' config class (decision 24)."""
    fields: tuple[Field, ...]
    conversions: tuple[Conversion, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys of config.json that change what is computed -> the values that ppctl builds; the first is the default."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Module -> its name, if that is not its name in `LAYER`."""
    also: tuple[str, ...] = ()
    """Other values of model_type that mean this family."""
    synonyms: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """Another name of a key in transformers -> the name in this table."""


_SIZES = (
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings"),
    Field("rms_norm_eps", "norm_epsilon"),
    Field("initializer_range", "init_method_std"),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights"),
)
_GROUPED = (*_SIZES, Field("num_key_value_heads", "num_query_groups"), Field("head_dim", "kv_channels"))
_LATENT = (
    *_SIZES,
    Field("q_lora_rank", "q_lora_rank", nullable=True),
    Field("kv_lora_rank", "kv_lora_rank"),
    Field("qk_nope_head_dim", "qk_head_dim"),
    Field("qk_rope_head_dim", "qk_pos_emb_head_dim"),
    Field("v_head_dim", "v_head_dim"),
)
_ROUTED = (Field("num_experts_per_tok", "moe_router_topk"), Field("moe_intermediate_size", "moe_ffn_hidden_size"))
_MTP = Field("num_nextn_predict_layers", "mtp_num_layers", write=lambda number: number or 0)
"""Written as 0 too: transformers assumes one module if the key is missing."""
_DEEPSEEK_EXPERTS = (*_ROUTED, Field("aux_loss_alpha", "moe_aux_loss_coeff"))

_SILU = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}
_NO_WINDOW = {"use_sliding_window": (False,)}
_SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
_BALANCED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_MLA = {"multi_latent_attention": True, "rotary_interleaved": True}

_COMMON = {
    "initializer_range": 0.02, "tie_word_embeddings": False, "rope_theta": 10000.0, "rms_norm_eps": 1e-6,
    "num_key_value_heads": None, "head_dim": None,
}  # fmt: skip
_LLAMA = {
    **_COMMON, "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "max_position_embeddings": 2048,
}  # fmt: skip
_QWEN = {
    **_COMMON, "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768,
}  # fmt: skip
_MIXTRAL = {
    **_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
_QWEN_MOE = {
    **_QWEN, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    "decoder_sparse_step": 1, "mlp_only_layers": None, "router_aux_loss_coef": 0.001,
}  # fmt: skip
_NOT_STORED = {"aux_loss_alpha": 0.0, "num_nextn_predict_layers": None}
"""Unlike transformers' classes: without the key there is no module for multi-token prediction."""
_GLM = {
    **_COMMON, **_NOT_STORED, "vocab_size": 151552, "hidden_size": 4096, "intermediate_size": 10944,
    "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": False,
    "moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True,
}  # fmt: skip
_LATENT_SIZES = {
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
}  # fmt: skip
_DEEPSEEK_V3 = {
    **_COMMON, **_LATENT_SIZES, **_NOT_STORED, "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_attention_heads": 128, "max_position_embeddings": 4096,
    "moe_intermediate_size": 2048, "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 256,
    "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_DEEPSEEK_V2 = {
    **_LLAMA, **_LATENT_SIZES, "aux_loss_alpha": 0.0, "vocab_size": 102400, "moe_intermediate_size": 1407,
    "n_shared_experts": 2, "n_routed_experts": 64, "first_k_dense_replace": 0,
}  # fmt: skip
"""num_experts_per_tok is not among them: transformers' default is null, with which no expert is chosen."""

_MORE_EXPERTS = {"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"}

FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", {}, _LLAMA, _GROUPED, (ROPE,),
        {**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    Family("qwen2", "Qwen2ForCausalLM", {"add_qkv_bias": True}, _QWEN, _GROUPED, (ROPE,), {**_SILU, **_NO_WINDOW}),
    Family(
        "qwen3", "Qwen3ForCausalLM", {"qk_layernorm": True}, {**_QWEN, "head_dim": 128}, _GROUPED, (ROPE,),
        {**_SILU, **_NO_WINDOW, "attention_bias": (False,)},
    ),
    Family(
        "mixtral", "MixtralForCausalLM", {}, _MIXTRAL,
        (
            *_GROUPED,
            Field("num_local_experts", "num_moe_experts"),
            Field("num_experts_per_tok", "moe_router_topk"),
            Field("router_aux_loss_coef", "moe_aux_loss_coeff"),
        ),
        (ROPE,),
        {**_SILU, "sliding_window": (None,), "router_jitter_noise": (0.0,)},
        names=MIXTRAL,
        synonyms={"num_experts": "num_local_experts"},
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", {"qk_layernorm": True}, _QWEN_MOE,
        (
            *_GROUPED,
            *_ROUTED,
            Field("router_aux_loss_coef", "moe_aux_loss_coeff"),
            Field("norm_topk_prob", "moe_router_pre_softmax", read=not_, write=not_),
        ),
        (ROPE, SPARSE_STEP),
        {**_SILU, **_NO_WINDOW, "attention_bias": (False,)},
        synonyms={"num_local_experts": "num_experts"},
    ),
    Family(
        "glm4_moe", "Glm4MoeForCausalLM", _BALANCED, _GLM,
        (
            *_GROUPED,
            *_DEEPSEEK_EXPERTS,
            _MTP,
            Field("attention_bias", "add_qkv_bias"),
            Field("use_qk_norm", "qk_layernorm"),
        ),
        (PART_ROPE, FIRST_DENSE, GROUPS, DIVIDED),
        _SILU,
        synonyms=_MORE_EXPERTS,
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", {**_MLA, **_BALANCED}, _DEEPSEEK_V3,
        (*_LATENT, *_DEEPSEEK_EXPERTS, _MTP),
        (ROPE, FIRST_DENSE, GROUPS, DIVIDED),
        {**_SILU, **_SIGMOID, "attention_bias": (False,), "rope_interleave": (True,), "moe_layer_freq": (1,)},
        names=LATENT,
        also=("kimi_k2",),
        synonyms=_MORE_EXPERTS,
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", {**_MLA, "moe_router_pre_softmax": True}, _DEEPSEEK_V2,
        (*_LATENT, *_DEEPSEEK_EXPERTS),
        (ROPE, FIRST_DENSE),
        {
            **_SILU, "scoring_func": ("softmax",), "topk_method": ("greedy",), "attention_bias": (False,),
            "mlp_bias": (False,), "n_group": (1, None), "topk_group": (1, None), "routed_scaling_factor": (1.0,),
            "moe_layer_freq": (1,), "norm_topk_prob": (False,),
        },
        names=LATENT,
        synonyms={"num_experts": "n_routed_experts"},
    ),
)  # fmt: skip
