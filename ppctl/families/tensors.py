"""The tensors of a model: canonical name and shape of each, once, in canonical order.

Knows the blocks' shapes as closed forms, for whoever must check weights without building a model. Must not know torch,
other people's names or files. A tied output and the copy of the embedding that MTP reads are uses, not tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import expert_width, head_dim, mtp_is_moe, query_groups
from ppctl.geometry.moe_layer_freq import moe_layer_pattern

Shape = tuple[int, ...]


def model_tensors(model: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape, for the whole model with its multi-token prediction; every expert is by itself."""
    table, h = (model.vocab_size, model.hidden_size), model.hidden_size
    found: dict[str, Shape] = {"tok_embeddings.weight": table}
    for index, moe in enumerate(moe_layer_pattern(model)):
        found |= {f"layers.{index}.{name}": shape for name, shape in layer_tensors(model, moe).items()}
    for depth in range(model.mtp_num_layers or 0):
        inner = layer_tensors(model, mtp_is_moe(model))
        found |= {f"mtp.{depth}.{name}.weight": (h,) for name in ("enorm", "hnorm")}
        found[f"mtp.{depth}.eh_proj.weight"] = (h, 2 * h)
        found |= {f"mtp.{depth}.layer.{name}": shape for name, shape in inner.items()}
        found[f"mtp.{depth}.norm.weight"] = (h,)
    found["norm.weight"] = (h,)
    return found if model.share_embeddings_and_output_weights else found | {"output.weight": table}


def layer_tensors(model: ModelConfig, moe: bool) -> dict[str, Shape]:
    """Name within one decoder layer -> shape."""
    attention = _latent_attention(model) if model.multi_latent_attention else _grouped_attention(model)
    return {
        **{f"attention.{name}": shape for name, shape in attention},
        "attention_norm.weight": (model.hidden_size,),
        **dict(_experts(model) if moe else _feed_forward("feed_forward", model.hidden_size, model.ffn_hidden_size)),
        "ffn_norm.weight": (model.hidden_size,),
    }


def _grouped_attention(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    h, d = model.hidden_size, head_dim(model)
    q, kv = model.num_attention_heads * d, query_groups(model) * d
    for name, width in (("wq", q), ("wk", kv), ("wv", kv)):
        yield f"{name}.weight", (width, h)
        if model.add_qkv_bias:
            yield f"{name}.bias", (width,)
    yield "wo.weight", (h, q)
    if model.qk_layernorm:
        yield "q_norm.weight", (d,)
        yield "k_norm.weight", (d,)


def _latent_attention(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    h, heads, rope, kv = model.hidden_size, model.num_attention_heads, model.qk_pos_emb_head_dim, model.kv_lora_rank
    queries, rank = heads * (model.qk_head_dim + rope), model.q_lora_rank
    if rank is None:
        yield "wq.weight", (queries, h)
    else:
        yield "wq_a.weight", (rank, h)
        yield "q_norm.weight", (rank,)
        yield "wq_b.weight", (queries, rank)
    yield "wkv_a.weight", (kv + rope, h)
    yield "kv_norm.weight", (kv,)
    yield "wkv_b.weight", (heads * (model.qk_head_dim + model.v_head_dim), kv)
    yield "wo.weight", (h, heads * model.v_head_dim)


def _feed_forward(prefix: str, h: int, width: int) -> Iterator[tuple[str, Shape]]:
    yield f"{prefix}.w1.weight", (width, h)
    yield f"{prefix}.w2.weight", (h, width)
    yield f"{prefix}.w3.weight", (width, h)


def _experts(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    h, total, width = model.hidden_size, model.num_moe_experts or 0, expert_width(model)
    yield "moe.router.weight", (total, h)
    if model.moe_router_enable_expert_bias:
        yield "moe.router.expert_bias", (total,)
    for expert in range(total):
        yield from _feed_forward(f"moe.experts.{expert}", h, width)
    if model.moe_shared_expert_intermediate_size:
        yield from _feed_forward("moe.shared_experts", h, model.moe_shared_expert_intermediate_size)
