"""Bytes that one layer keeps of a microbatch on one device from its forward to its backward, part by part.

Source: Korthikanti et al., arXiv 2205.05198, for the parts and what sequence parallelism divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.context_parallelism import exchanging, kept_more
from ppctl.cost.setting import Setting
from ppctl.geometry.expert_reach import expert_runs, reached
from ppctl.geometry.layers import Kind
from ppctl.geometry.parameters import Sizes


class LayerPart(NamedTuple):
    """Bytes per token that one part of a layer keeps; `module` names the recomputation that drops it."""

    module: str
    size: float


INPUT = "input"
"""The layer's own input."""


def layer_parts(model: ModelConfig, kind: Kind, setting: Setting) -> list[LayerPart]:
    """Bytes per token that one layer keeps, without recomputation."""
    hidden = model.hidden_size / setting.sp
    if kind.name == "embedding":
        return [LayerPart(INPUT, 8)]
    if kind.name == "loss":
        per_logit = setting.logit_bytes
        per_logit = setting.element if per_logit is None else per_logit
        # With a divided vocabulary: a log-sum, the label's place, and whether it is on this rank and counts.
        divided = setting.wide_bytes + 10 if setting.sizes.tp > 1 and setting.allocator.backward else 0
        states = model.outputs * (setting.element * hidden + per_logit * setting.words(model) + divided)
        return [LayerPart(INPUT, states + 8 + (0 if model.mtp_num_layers else final_norm_bytes(setting) * hidden))]
    layer = [*attention_parts(model, setting, kind.cp_comm_type), *feed_forward_parts(model, kind.moe, setting)]
    return [*layer, LayerPart("mtp", _mtp_vectors(setting) * hidden)] if kind.name == "mtp" else layer


def norm_parts(width: float, setting: Setting, module: str = INPUT) -> Iterator[LayerPart]:
    """A norm's input (kept by `module`) and output, per token."""
    inside, outside = norm_sizes(setting)
    yield LayerPart(module, width * inside)
    yield LayerPart("layernorm", width * (outside - setting.element + setting.operand))
    if setting.allocator.norm_statistics:
        yield LayerPart("layernorm", setting.wide_bytes * setting.allocator.norm_statistics)


def attention_parts(model: ModelConfig, setting: Setting, cp_comm_type: str = "p2p") -> Iterator[LayerPart]:
    """Input, norm, projections, scores and result of one attention."""
    size, sizes = setting.element, Sizes.of(model)
    h, heads, tp = sizes.hidden, sizes.heads, setting.sizes.tp
    yield from norm_parts(h / setting.sp, setting)
    if sizes.latent:
        inside, outside = norm_sizes(setting)
        # each rank keeps the compressed vectors of its own tokens
        parts = setting.sp if setting.allocator.backward else 1
        latent = ((sizes.q_rank or 0) + sizes.kv_rank) / parts
        yield LayerPart("attention", latent * inside + size * (sizes.turned / parts + heads * sizes.v_head / tp))
        queries = size * heads * sizes.query_head / tp
        # Without a latent, queries are computed from the layer's input.
        yield LayerPart("attention" if sizes.q_rank is None else "mla_up_proj", queries)
        yield LayerPart("mla_up_proj", latent * outside + size * heads * (sizes.query_head + sizes.v_head) / tp)
    else:
        groups = setting.groups(sizes)
        normed = (heads + groups) * sum(norm_sizes(setting)) if sizes.qk_norm else 0
        plain = size * ((0 if normed else heads + groups) + heads + groups)
        statistics = setting.wide_bytes * (heads + groups) * setting.allocator.norm_statistics if normed else 0
        yield LayerPart("attention", (sizes.head * (normed + plain) + statistics) / tp)
    ranks = exchanging(cp_comm_type, setting.sizes, setting.levels)
    by_blocks = setting.sizes.cp > ranks  # a ring or gather keeps no scores, nor a result per document
    yield LayerPart("core_attn", setting.wide_bytes * heads / tp if by_blocks else _scores(model, setting))
    yield LayerPart("core_attn", size * kept_more(model, ranks, setting.sizes))
    if setting.packed and not by_blocks and ranks == 1:  # ranks that exchange heads have that result too
        yield LayerPart("core_attn", size * heads * sizes.value_head / tp)
    yield LayerPart("attention", h / setting.sp * _masked(model, setting))


def norm_sizes(setting: Setting) -> tuple[int, int]:
    """Bytes per element of a norm's input and of its output."""
    if setting.allocator.fp32_norms:
        return setting.wide_bytes, setting.element + setting.wide_bytes
    return setting.element, setting.element


def _masked(model: ModelConfig, setting: Setting) -> int:
    """Bytes of an element's dropout mask; 0 for ppctl's own dropout, which draws it again."""
    return 1 if model.hidden_dropout and setting.allocator.transformer_engine else 0


def _scores(model: ModelConfig, setting: Setting) -> float:
    """Bytes per token of the softmax's sums, one a head; without a fused kernel also of every pair's probability, and
    with dropout of the mask and the result. torch's unfused kernel computes in float32, and keeps float32 copies of
    all heads' queries, keys and values instead. ppctl's own attention with dropout keeps nothing of all this."""
    own = setting.allocator.transformer_engine
    sums = setting.wide_bytes * Sizes.of(model).heads / setting.sizes.tp
    if model.attention_dropout and not own:
        return 0.0
    if model.attention_backend != "unfused":
        return sums
    if not own:
        sizes = Sizes.of(model)
        per_head = 2 * sizes.query_head + sizes.value_head
        shared = sizes.heads - (sizes.heads if sizes.latent else sizes.groups)
        fused = sizes.heads * per_head - shared * (sizes.query_head + sizes.value_head)
        scores = sizes.heads * (setting.seq_length - 1)  # minus what a fused kernel keeps of each head and token
        unfused = setting.wide_bytes * (sizes.heads * per_head + scores)
        return sums + (unfused - setting.element * fused) / setting.sizes.tp
    per_pair = setting.element + (setting.element + 1 if model.attention_dropout else 0)
    return sums + model.num_attention_heads / setting.sizes.tp * setting.seq_length * per_pair


def feed_forward_parts(model: ModelConfig, moe: bool, setting: Setting) -> Iterator[LayerPart]:
    """Input, norm and inner vectors of one feed-forward; with `moe`, the inner vectors of every chosen expert."""
    size, axes, sizes = setting.element, setting.sizes, Sizes.of(model)
    h, factors = sizes.hidden, 1 + sizes.gated  # silu of the gate is made again (`model/activation.py`)
    inside = size * factors + setting.operand
    yield from norm_parts(h / setting.sp, setting, "residual")
    if moe:
        chosen, float32 = model.moe_router_topk, setting.wide_bytes
        # A device's experts see etp/tp times its own tokens and have 1/etp of the width: together 1/tp.
        copies = h * axes.etp / axes.tp
        inner = chosen * sizes.expert / axes.tp
        # The router's scores in float32; for every chosen expert its score, two weights, and the places of its row.
        routing = float32 * sizes.experts + (size + 2 * float32) * chosen + _places(model, setting)
        yield LayerPart("moe", setting.operand * chosen * copies + routing / setting.sp)
        yield LayerPart("experts", size * factors * inner)
        yield LayerPart("moe_act", setting.operand * inner)
        yield LayerPart("moe", inside * sizes.shared / axes.tp)
    else:
        yield LayerPart("mlp", inside * sizes.ffn / axes.tp)
    yield LayerPart("residual", h / setting.sp * _masked(model, setting))


def _places(model: ModelConfig, setting: Setting) -> float:
    """Bytes of a token's int64 indexes. Each chosen expert has a number, a slot and a row in both directions (at home
    or by node), and once more rows at other ranks' experts; then come the starts of sums, by run and by token."""
    chosen, runs = model.moe_router_topk, expert_runs(model)
    starts: float = runs.most if runs.size > 1 and runs.most > 1 else 0
    if setting.nodes > 1:
        starts = reached(model, setting.nodes) * (1 + chosen) + 2 * reached(model, runs.number) + 1
    return 8 * ((6 if setting.sizes.ep * setting.sizes.etp > 1 else 4) * chosen + starts)


def final_norm_bytes(setting: Setting) -> float:
    """Bytes per element that the final norm keeps; its output is kept by the layer that reads it."""
    inside, outside = norm_sizes(setting)
    return inside + outside - setting.element


def _mtp_vectors(setting: Setting) -> float:
    """Bytes per element of a hidden state that an MTP module keeps beside its layer, with or without recomputation: the
    embedding and its norm, both normalised vectors side by side, and a final norm. Norms in float32 keep the state as
    well."""
    inside, outside = norm_sizes(setting)
    return inside + 2 * outside + final_norm_bytes(setting) + (inside if setting.allocator.fp32_norms else 0)
