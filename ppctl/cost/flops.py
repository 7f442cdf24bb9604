"""Model FLOPs of one microbatch's forward, per layer and per stage.

Knows which matrix products a layer makes. Must not know devices, ranks or schedules. Counted as Megatron does: two
operations per multiply-add, causal attention halved, active experts only, MTP and its output included, nothing for
norms, rotations and softmax. A training step is three forwards. Recompute never counts.
"""

from __future__ import annotations

from collections.abc import Iterable

from ppctl.config.schema import ModelConfig
from ppctl.cost.parameters import feed_forward_matrices
from ppctl.geometry.layers import KindName, Layer, expert_width, head_dim, layer_kinds, query_groups


def attention_flops(model: ModelConfig, batch: int, seq: int) -> int:
    """Projections, scores and weighted values of one layer, for `batch` sequences of `seq` tokens."""
    h, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        d = head_dim(model)
        matrices = h * d * (2 * heads + 2 * query_groups(model))
        widths = 2 * d
    else:
        q_width, kv = model.qk_head_dim + model.qk_pos_emb_head_dim, model.kv_lora_rank
        q = model.q_lora_rank
        matrices = h * heads * q_width if q is None else q * (h + heads * q_width)
        matrices += h * (kv + model.qk_pos_emb_head_dim) + kv * heads * (model.qk_head_dim + model.v_head_dim)
        matrices += heads * model.v_head_dim * h
        widths = q_width + model.v_head_dim
    return 2 * batch * seq * matrices + batch * seq * seq * heads * widths


def feed_forward_flops(model: ModelConfig, moe: bool, batch: int, seq: int) -> int:
    """The dense feed-forward; or router, shared expert and the chosen experts."""
    h, each = model.hidden_size, feed_forward_matrices(model) * model.hidden_size
    if not moe:
        matrices = each * model.ffn_hidden_size
    else:
        shared = model.moe_shared_expert_intermediate_size or 0
        matrices = h * (model.num_moe_experts or 0) + each * (shared + model.moe_router_topk * expert_width(model))
    return 2 * batch * seq * matrices


def layer_flops(model: ModelConfig, kind: KindName, moe: bool, batch: int, seq: int) -> int:
    """One layer: of the embedding (a look-up) none, of the loss the output, once more per MTP module."""
    h = model.hidden_size
    if kind == "loss":
        return 2 * batch * seq * h * model.vocab_size * (1 + (model.mtp_num_layers or 0))
    if kind not in ("decoder", "mtp"):
        return 0
    layer = attention_flops(model, batch, seq) + feed_forward_flops(model, moe, batch, seq)
    return layer + (2 * batch * seq * 2 * h * h if kind == "mtp" else 0)


def stage_flops(model: ModelConfig, layers: Iterable[Layer], micro_batch_size: int, seq_length: int) -> int:
    """Model FLOPs of one microbatch's forward through a stage, over all of its tp and cp ranks."""
    kinds = layer_kinds(model, layers)
    return sum(layer_flops(model, kind, moe, micro_batch_size, seq_length) for kind, moe in kinds)
