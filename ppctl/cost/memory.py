"""Bytes of state and of activations on one device.

Knows the precision recipes of `train/precision.py` and what one microbatch's forward keeps for its backward. Must not
know schedules beyond their order of F, B and W, or devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.layers import moe_layer_pattern
from ppctl.cost.parameters import expert_width, head_dim, mtp_is_moe, query_groups
from ppctl.schedule.action import Action, Op


class Precision(NamedTuple):
    """Bytes per parameter and per activation element."""

    dtype: str
    weight: int
    gradient: int
    optimizer: int
    """AdamW's two fp32 moments, and the fp32 master weight where weights are narrower."""
    activation: int


PRECISIONS = {
    "float32": Precision("float32", 4, 4, 8, 4),
    "bfloat16": Precision("bfloat16", 2, 4, 12, 2),
    "float16": Precision("float16", 2, 4, 12, 2),
}


class Shares(NamedTuple):
    """What one device holds of a microbatch: tokens and the sizes that divide its activations."""

    micro_batch_size: int
    seq_length: int
    tp: int = 1
    cp: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.micro_batch_size * -(-self.seq_length // self.cp)


def attention_elements(model: ModelConfig, tp: int) -> float:
    """Elements per token that an attention block keeps: the output of its norm; queries, keys, values; the result.

    MLA keeps its two compressed vectors before and after their norms as well.
    """
    h, heads = model.hidden_size, model.num_attention_heads
    if not model.multi_latent_attention:
        d = head_dim(model)
        normed = heads + query_groups(model) if model.qk_layernorm else 0
        return h + d * (2 * heads + 2 * query_groups(model) + normed) / tp
    compressed = 2 * (model.q_lora_rank or 0) + 2 * model.kv_lora_rank + model.qk_pos_emb_head_dim
    q_width = model.qk_head_dim + model.qk_pos_emb_head_dim
    return h + compressed + heads * (2 * q_width + 2 * model.v_head_dim) / tp


def feed_forward_elements(model: ModelConfig, moe: bool, tp: int) -> float:
    """Elements per token of a feed-forward: the output of its norm; gate, up, the gate's activation and the product.

    Experts: the same for each chosen one, on its own copy of the token, and its output.
    """
    h = model.hidden_size
    if not moe:
        return h + 4 * model.ffn_hidden_size / tp
    shared = 4 * (model.moe_shared_expert_intermediate_size or 0) / tp
    chosen = model.moe_router_topk * (2 * h + 4 * expert_width(model) / tp)
    return h + shared + chosen


def layer_bytes(model: ModelConfig, kind: str, moe: bool, shares: Shares, precision: Precision) -> int:
    """What one layer keeps from its forward to its backward, in bytes, without recompute.

    decoder: tokens x (2 h for the inputs of its two norms + attention + feed-forward elements) x element size, and
    fp32 statistics: one per norm, one log-sum-exp per head, a router's logits and probabilities. mtp: a decoder layer
    and 5 h for its norms and projection.
    embedding: the token ids. loss: 2 h, and logits and log-probabilities in fp32, once more per MTP module.
    """
    h, tp = model.hidden_size, shares.tp
    if kind == "embedding":
        return shares.tokens * 8
    if kind == "loss":
        vectors = 1 + (model.mtp_num_layers or 0)
        per_token = vectors * (2 * h * precision.activation + 8 * model.vocab_size / tp) + 8
        return int(shares.tokens * per_token)
    elements = 2 * h + attention_elements(model, tp) + feed_forward_elements(model, moe, tp)
    if kind == "mtp":
        elements += 5 * h
    statistics = 4 * (2 + model.num_attention_heads / tp) + (8 * (model.num_moe_experts or 0) if moe else 0)
    return int(shares.tokens * (elements * precision.activation + statistics))


def stage_activation_bytes(model: ModelConfig, layer_names: Iterable[str], shares: Shares, precision: Precision) -> int:
    """What one microbatch keeps alive on a stage from its F to its B, on one device. An empty stage keeps its input."""
    pattern = moe_layer_pattern(model)
    layer_names = tuple(layer_names)
    if not layer_names:
        return shares.tokens * model.hidden_size * precision.activation
    total = 0
    for name in layer_names:
        kind, _, index = name.partition(".")
        moe = pattern[int(index)] if kind == "decoder" else mtp_is_moe(model)
        total += layer_bytes(model, kind, moe, shares, precision)
    return total


def peaks(actions: Iterable[Action], bytes_of: Sequence[int]) -> tuple[int, int]:
    """(activations in flight, their bytes) of one rank, each at its largest.

    A (stage, microbatch) lives from the start of its F to the end of its B, or of its W where the backward is split,
    and holds `bytes_of[stage]`. Exact, since a rank runs its list in order. One walk for both: plans hold many actions.
    """
    alive = most = held = largest = 0
    for op, stage, _ in actions:
        if op is Op.F:
            alive += 1
            held += bytes_of[stage]
            if alive > most:
                most = alive
            if held > largest:
                largest = held
        elif op is Op.B or op is Op.W:
            alive -= 1
            held -= bytes_of[stage]
    return most, largest
