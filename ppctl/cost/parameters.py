"""Exact parameter counts from the model's sizes, per layer and for the whole model.

Knows what a decoder layer, an embedding, an MTP module and an output hold. Must not know bytes, ranks or schedules; how
tensor and expert parallelism divide the counts is told by three heaps: `Count.tensor`, `Count.whole`, `Count.experts`.

Sources: Llama and Mixtral as published (GQA, SwiGLU, RMSNorm); DeepSeek-V2/V3 technical reports for multi-head latent
attention, shared experts and the MTP module (two norms, a projection 2h -> h, one decoder layer, a final norm); GPT-3
for LayerNorm, biases, feed-forwards without a gate and learned positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import (
    Kind,
    Layer,
    expert_width,
    head_dim,
    holds_final_norm,
    layer_kinds,
    mtp_is_moe,
    query_groups,
)
from ppctl.geometry.moe_layer_freq import moe_layer_pattern


class Count(NamedTuple):
    """Numbers of parameters, by what divides them over ranks."""

    tensor: int = 0
    """Matrices that tensor parallelism splits."""
    whole: int = 0
    """Held by every tensor-parallel rank: norms, routers, MLA's down-projections, MTP's projection."""
    experts: int = 0
    """Routed experts, split over ep and etp."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.tensor + self.whole + self.experts

    def plus(self, *others: Count) -> Count:
        """The sum, heap by heap."""
        return Count(*(sum(heap) for heap in zip(self, *others, strict=True)))

    def on_device(self, tp: int = 1, ep: int = 1, etp: int = 1) -> tuple[int, int]:
        """(dense parameters, experts' parameters) on one device: they are replicated over different ranks.

        An uneven split counts its largest part.
        """
        return -(-self.tensor // tp) + self.whole, -(-self.experts // (ep * etp))


def norm(model: ModelConfig, width: int) -> Count:
    """A norm over `width` features: LayerNorm has a bias beside its weight."""
    return Count(whole=width * (2 if model.normalization == "LayerNorm" else 1))


def feed_forward_matrices(model: ModelConfig) -> int:
    """Matrices of a feed-forward: gate, up, down; or up and down."""
    return 3 if model.gated_linear_unit else 2


def attention(model: ModelConfig) -> Count:
    """One attention block with its own norms, without the layer's input norm."""
    return _latent_attention(model) if model.multi_latent_attention else _grouped_attention(model)


def _grouped_attention(model: ModelConfig) -> Count:
    h, d = model.hidden_size, head_dim(model)
    q, kv = model.num_attention_heads * d, query_groups(model) * d
    bias = q + 2 * kv if model.add_qkv_bias or model.add_bias_linear else 0
    whole = (2 * norm(model, d).whole if model.qk_layernorm else 0) + (h if model.add_bias_linear else 0)
    return Count(tensor=h * (2 * q + 2 * kv) + bias, whole=whole)


def _latent_attention(model: ModelConfig) -> Count:
    h, heads, kv, rope = model.hidden_size, model.num_attention_heads, model.kv_lora_rank, model.qk_pos_emb_head_dim
    q_width = heads * (model.qk_head_dim + rope)
    up = kv * heads * (model.qk_head_dim + model.v_head_dim) + heads * model.v_head_dim * h
    down = h * (kv + rope) + norm(model, kv).whole
    if model.q_lora_rank is None:
        return Count(tensor=up + h * q_width, whole=down)
    q = model.q_lora_rank
    return Count(tensor=up + q * q_width, whole=down + h * q + norm(model, q).whole)


def dense_feed_forward(model: ModelConfig) -> Count:
    """Gate, up and down, or up and down alone."""
    return _feed_forward(model, model.ffn_hidden_size)


def _feed_forward(model: ModelConfig, width: int) -> Count:
    h, matrices = model.hidden_size, feed_forward_matrices(model)
    inner, outer = ((matrices - 1) * width, h) if model.add_bias_linear and width else (0, 0)
    return Count(tensor=matrices * h * width + inner, whole=outer)


def moe_feed_forward(model: ModelConfig, experts: int | None = None) -> Count:
    """Router (with its bias, where it has one), shared expert and `experts` routed ones (none: all)."""
    h, total = model.hidden_size, model.num_moe_experts or 0
    held = total if experts is None else experts
    router = Count(whole=h * total + (total if model.moe_router_enable_expert_bias else 0))
    routed = Count(experts=held * _feed_forward(model, expert_width(model)).total)
    return _feed_forward(model, model.moe_shared_expert_intermediate_size or 0).plus(router, routed)


def decoder(model: ModelConfig, moe: bool, experts: int | None = None) -> Count:
    """One decoder layer: two norms, attention, feed-forward."""
    before = norm(model, model.hidden_size)
    return before.plus(before, attention(model), moe_feed_forward(model, experts) if moe else dense_feed_forward(model))


def mtp_module(model: ModelConfig) -> Count:
    """One multi-token-prediction module without its copy of the embedding; its layer is of the last layer's kind."""
    h = model.hidden_size
    own = Count(whole=3 * norm(model, h).whole + 2 * h * h)
    return own.plus(decoder(model, mtp_is_moe(model)))


def embedding(model: ModelConfig) -> Count:
    """The token table; the output projection has the same size."""
    return Count(tensor=model.vocab_size * model.hidden_size)


def positions(model: ModelConfig) -> Count:
    """The table of learned positions, where there is one; every tensor-parallel rank holds it."""
    learned = model.position_embedding_type == "learned_absolute"
    return Count(whole=model.max_position_embeddings * model.hidden_size if learned else 0)


def stage_count(model: ModelConfig, layers: Iterable[Layer]) -> Count:
    """What a stage builds, replicas included: one with MTP modules builds a copy of the embedding for them."""
    held = tuple(layers)
    kinds = layer_kinds(model, held)
    each = {kind: layer_count(model, kind) for kind in set(kinds)}
    parts = [each[kind] for kind in kinds]
    if holds_final_norm(model, held):
        parts.append(norm(model, model.hidden_size))
    if any(kind.name == "mtp" for kind in each):
        parts.append(embedding(model))
    return Count().plus(*parts)


def layer_count(model: ModelConfig, kind: Kind) -> Count:
    """One layer; an embedding with its positions, a loss with its output."""
    if kind.name == "decoder":
        return decoder(model, kind.moe)
    if kind.name == "mtp":
        return mtp_module(model)
    return embedding(model).plus(positions(model)) if kind.name == "embedding" else embedding(model)


def largest_matrix(model: ModelConfig, layers: Iterable[Layer], expert_ranks: int = 1) -> int:
    """Elements of the largest tensor of a stage; a layer's experts on one of `expert_ranks` are one for each matrix."""
    h, sizes = model.hidden_size, [0]
    experts = (model.num_moe_experts or 0) // expert_ranks
    for kind, moe in set(layer_kinds(model, layers)):
        if kind != "decoder":
            sizes.append(embedding(model).total)
        if kind in ("decoder", "mtp"):
            sizes.append(_largest_of_attention(model))
            sizes.append(experts * h * expert_width(model) if moe else h * model.ffn_hidden_size)
    return max(sizes)


def _largest_of_attention(model: ModelConfig) -> int:
    h, heads, rope = model.hidden_size, model.num_attention_heads, model.qk_pos_emb_head_dim
    if not model.multi_latent_attention:
        return h * heads * head_dim(model)
    queries = (model.q_lora_rank or h) * (model.qk_head_dim + rope)
    up = model.kv_lora_rank * (model.qk_head_dim + model.v_head_dim)
    return heads * max(queries, up, model.v_head_dim * h)


def replicated_parameters(model: ModelConfig, layers: Iterable[Layer]) -> int:
    """Of a stage's parameters, those that copy an earlier use: a tied output, the embedding that MTP reads."""
    kinds = {layer.kind for layer in layers}
    copies = int("mtp" in kinds) + int("loss" in kinds and model.share_embeddings_and_output_weights)
    return copies * embedding(model).total


def total_parameters(model: ModelConfig) -> int:
    """The model: each tied parameter once, router biases in, MTP out."""
    return _backbone(model, None)


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token meets in the model without MTP: of the routed experts only the chosen ones."""
    return _backbone(model, model.moe_router_topk)


def mtp_parameters(model: ModelConfig) -> int:
    """All MTP modules, without copies of embedding and output."""
    return (model.mtp_num_layers or 0) * mtp_module(model).total


def hugging_face_parameters(model: ModelConfig) -> int:
    """The model as Hugging Face stores it: MTP modules in, each with its own copy of embedding and output."""
    copies = (model.mtp_num_layers or 0) * 2 * embedding(model).total
    return total_parameters(model) + mtp_parameters(model) + copies


def _backbone(model: ModelConfig, experts: int | None) -> int:
    pattern = moe_layer_pattern(model)
    tables = 1 if model.share_embeddings_and_output_weights else 2
    layers = sum(pattern.count(moe) * decoder(model, moe, experts).total for moe in set(pattern))
    return layers + tables * embedding(model).total + positions(model).total + norm(model, model.hidden_size).total
