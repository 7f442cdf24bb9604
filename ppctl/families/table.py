"""The families: how each writes a model's sizes in config.json, and what it calls its tensors.

Knows keys, defaults and fixed choices, as data. Must not know files. Sources: the public config.json of each family's
models, and the defaults of the classes in transformers that read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.families import parts
from ppctl.families.names import LATENT, MIXTRAL

REQUIRED = object()


class Field(NamedTuple):
    """One key of config.json that is one of ours."""

    theirs: str
    ours: str
    default: Any = REQUIRED
    """What a config.json without the key means."""


class Part(NamedTuple):
    """Several keys of config.json that make several of ours; each direction is a function."""

    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[ModelConfig], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model."""

    model_type: str
    architecture: str
    """transformers' class, as config.json names it."""
    implied: Mapping[str, Any]
    """Our keys that every model of the family has at this value."""
    fields: tuple[Field, ...]
    parts: tuple[Part, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys of config.json that change what is computed -> the values that ppctl builds; the first is the default."""
    names: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    """What it calls otherwise than the other families."""
    also: tuple[str, ...] = ()
    """Other values of model_type that mean this family."""


_SIZES = (
    Field("num_hidden_layers", "num_layers"),
    Field("hidden_size", "hidden_size"),
    Field("intermediate_size", "ffn_hidden_size"),
    Field("num_attention_heads", "num_attention_heads"),
    Field("vocab_size", "vocab_size"),
    Field("max_position_embeddings", "max_position_embeddings", 2048),
    Field("rms_norm_eps", "norm_epsilon", 1e-6),
    Field("initializer_range", "init_method_std", 0.02),
    Field("tie_word_embeddings", "share_embeddings_and_output_weights", False),
)
_GROUPED = (*_SIZES, Field("num_key_value_heads", "num_query_groups", None), Field("head_dim", "kv_channels", None))
_LATENT = (
    *_SIZES,
    Field("q_lora_rank", "q_lora_rank", 1536),
    Field("kv_lora_rank", "kv_lora_rank", 512),
    Field("qk_nope_head_dim", "qk_head_dim", 128),
    Field("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
    Field("v_head_dim", "v_head_dim", 128),
)
_ROUTED = (
    Field("num_experts_per_tok", "moe_router_topk", 8),
    Field("moe_intermediate_size", "moe_ffn_hidden_size", None),
)
_DEEPSEEK_EXPERTS = (*_ROUTED, Field("aux_loss_alpha", "moe_aux_loss_coeff", 0.0))
_MTP = Field("num_nextn_predict_layers", "mtp_num_layers", None)

_ROPE = Part(parts.read_rope, parts.write_rope)
_PART_ROPE = Part(parts.read_part_rope, parts.write_part_rope)
_FIRST_DENSE = Part(parts.read_first_dense, parts.write_first_dense)
_GROUPS = Part(parts.read_groups, parts.write_groups)
_SPARSE_STEP = Part(parts.read_sparse_step, parts.write_sparse_step)
_NORMALISED = Part(parts.read_normalised, parts.write_normalised)

_SILU = {"hidden_act": ("silu",), "attention_dropout": (0.0,)}
_NO_WINDOW = {"use_sliding_window": (False,)}
_SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",), "norm_topk_prob": (True,)}
_BALANCED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_MLA = {"multi_latent_attention": True, "rotary_interleaved": True}

FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", {}, _GROUPED, (_ROPE,),
        {**_SILU, "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    Family("qwen2", "Qwen2ForCausalLM", {"add_qkv_bias": True}, _GROUPED, (_ROPE,), {**_SILU, **_NO_WINDOW}),
    Family(
        "qwen3", "Qwen3ForCausalLM", {"qk_layernorm": True}, _GROUPED, (_ROPE,),
        {**_SILU, **_NO_WINDOW, "attention_bias": (False,)},
    ),
    Family(
        "mixtral", "MixtralForCausalLM", {},
        (
            *_GROUPED,
            Field("num_local_experts", "num_moe_experts"),
            Field("num_experts_per_tok", "moe_router_topk", 2),
            Field("router_aux_loss_coef", "moe_aux_loss_coeff", 0.0),
        ),
        (_ROPE,),
        {**_SILU, "sliding_window": (None,), "router_jitter_noise": (0.0,)},
        names=MIXTRAL,
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", {"qk_layernorm": True},
        (
            *_GROUPED,
            *_ROUTED,
            Field("num_experts", "num_moe_experts"),
            Field("router_aux_loss_coef", "moe_aux_loss_coeff", 0.0),
        ),
        (_ROPE, _SPARSE_STEP, _NORMALISED),
        {**_SILU, **_NO_WINDOW, "attention_bias": (False,)},
    ),
    Family(
        "glm4_moe", "Glm4MoeForCausalLM", _BALANCED,
        (
            *_GROUPED,
            *_DEEPSEEK_EXPERTS,
            _MTP,
            Field("attention_bias", "add_qkv_bias", False),
            Field("use_qk_norm", "qk_layernorm", False),
        ),
        (_PART_ROPE, _FIRST_DENSE, _GROUPS),
        {**_SILU, "norm_topk_prob": (True,)},
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", {**_MLA, **_BALANCED}, (*_LATENT, *_DEEPSEEK_EXPERTS, _MTP),
        (_ROPE, _FIRST_DENSE, _GROUPS),
        {**_SILU, **_SIGMOID, "attention_bias": (False,), "rope_interleave": (True,), "moe_layer_freq": (1,)},
        names=LATENT,
        also=("kimi_k2",),
    ),
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", _MLA, (*_LATENT, *_DEEPSEEK_EXPERTS),
        (_ROPE, _FIRST_DENSE, _NORMALISED),
        {
            **_SILU, "scoring_func": ("softmax",), "topk_method": ("greedy",), "attention_bias": (False,),
            "mlp_bias": (False,), "n_group": (1, None), "topk_group": (1, None), "routed_scaling_factor": (1.0,),
            "moe_layer_freq": (1,),
        },
        names=LATENT,
    ),
)  # fmt: skip
