"""What one device does for one microbatch in one layer: operations, bytes through memory, bytes over links.

Knows the parts of layers and the sizes that divide them. Must not know rates, schedules or stages. Parts go by the
names that recomputation uses, so that what is done again has a price.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.activations import Shares
from ppctl.cost.flops import attention_flops, feed_forward_flops
from ppctl.cost.parameters import Count, attention
from ppctl.geometry.layers import KindName, expert_width, head_dim, query_groups


class Work(NamedTuple):
    """Of one part's forward."""

    module: str
    matmul: float = 0.0
    """Operations in products with weights; the backward does as many for its inputs and again for the weights."""
    scores: float = 0.0
    """Operations of attention's scores and weighted values; the backward does 2.5 times as many, all for its inputs."""
    inputs: float = 0.0
    """Elements that the products read: 8-bit products have them narrowed first, and their gradients in the backward."""
    traffic: float = 0.0
    """Bytes through memory of what is no product."""
    weights: float = 0.0
    """Parameters that are read, and whose gradients are added up."""
    kernels: int = 0
    tensor: float = 0.0
    """Bytes that a device sends to its tensor-parallel group."""
    context: float = 0.0
    """Bytes that it sends around its context-parallel group, beside the scores."""
    experts: float = 0.0
    """Bytes of one copy of its tokens, 16 bits wide: dispatch and combine each send some copies."""


def layer_work(model: ModelConfig, kind: KindName, moe: bool, shares: Shares, element: int, ep: int = 1) -> list[Work]:
    """All parts of one layer; `element` are the bytes of an activation."""
    h, tokens = model.hidden_size, shares.tokens
    if kind == "embedding":
        rows = model.vocab_size / shares.tp
        return [Work("embedding", traffic=tokens * 3 * h * element, weights=rows * h, kernels=4)]
    if kind == "loss":
        columns = model.vocab_size / shares.tp
        logits = tokens * columns * (1 + (model.mtp_num_layers or 0))
        # Logits are written, widened, and read twice for a log-softmax.
        return [
            Work("layernorm", traffic=2 * tokens * h * element / shares.sp, kernels=2),
            Work("loss", matmul=2 * logits * h, inputs=tokens * h, weights=columns * h),
            Work("loss", traffic=12 * logits, kernels=10),
        ]
    works = [*_attention(model, shares, element), *_feed_forward(model, moe, shares, element, ep)]
    works.append(Work("layernorm", traffic=10 * tokens * h * element / shares.sp, kernels=4))
    if shares.tp > 1:
        # Before and after each of the two blocks: a gather and a scatter of the residual stream.
        works.append(Work("tensor", tensor=4 * tokens * h * element * (shares.tp - 1) / shares.tp))
    if kind == "mtp":
        works.append(
            Work("mtp", matmul=4 * tokens * h * h, traffic=8 * tokens * h * element, weights=2 * h * h, kernels=6)
        )
    return works


def _attention(model: ModelConfig, shares: Shares, element: int) -> Iterator[Work]:
    h, heads, tokens, tp = model.hidden_size, model.num_attention_heads, shares.tokens, shares.tp
    over = tp * shares.cp
    flops = attention_flops(model, shares.micro_batch_size, shares.seq_length) / over
    weights = _on_device(attention(model), tp)
    if model.multi_latent_attention:
        q_width = model.qk_head_dim + model.qk_pos_emb_head_dim
        scores = shares.micro_batch_size * shares.seq_length**2 * heads * (q_width + model.v_head_dim) / over
        up = 2 * tokens * heads * (model.kv_lora_rank * (model.qk_head_dim + model.v_head_dim)) / tp
        up += 2 * tokens * heads * (model.q_lora_rank or 0) * q_width / tp
        moved = 2 * heads * (2 * q_width + model.v_head_dim) / tp
        latent = tokens * ((model.q_lora_rank or 0) + model.kv_lora_rank)
        yield Work("mla_up_proj", matmul=up, inputs=latent, traffic=tokens * moved * element, kernels=10)
        keys, result = heads * (q_width + model.v_head_dim) / tp, heads * model.v_head_dim / tp
    else:
        d, groups = head_dim(model), query_groups(model)
        scores = shares.micro_batch_size * shares.seq_length**2 * heads * 2 * d / over
        up = 0.0
        yield Work("attention", traffic=2 * tokens * (heads + groups) * d / tp * element, kernels=6)
        keys, result = 2 * groups * d / tp, heads * d / tp
    ring = tokens * keys * element * (shares.cp - 1)
    yield Work("attention", matmul=flops - scores - up, inputs=tokens * (h + result), weights=weights, kernels=4)
    yield Work("core_attn", scores=scores, context=ring, kernels=2)


def _feed_forward(model: ModelConfig, moe: bool, shares: Shares, element: int, ep: int) -> Iterator[Work]:
    h, tokens, tp = model.hidden_size, shares.tokens, shares.tp
    flops = feed_forward_flops(model, moe, shares.micro_batch_size, shares.seq_length) / (tp * shares.cp)
    matrices = 3 if model.gated_linear_unit else 2
    if not moe:
        width = model.ffn_hidden_size / tp
        yield Work("mlp", matmul=flops, inputs=tokens * (h + width), weights=matrices * h * width, kernels=3)
        yield Work("mlp", traffic=matrices * tokens * width * element, kernels=2)
        return
    chosen, experts = model.moe_router_topk, model.num_moe_experts or 0
    inner = chosen * expert_width(model) / tp
    copies = chosen * h * shares.etp / tp
    shared = (model.moe_shared_expert_intermediate_size or 0) / tp
    held = (experts * expert_width(model) / (ep * shares.etp) + shared) * matrices * h
    yield Work("moe", matmul=flops, inputs=tokens * (copies + inner), weights=held, kernels=12)
    moved = 2 * copies + copies + h / tp
    yield Work("moe", traffic=tokens * (moved * element + 16 * experts / tp), kernels=30)
    yield Work("moe_act", traffic=matrices * tokens * (inner + shared) * element, kernels=3)
    if ep * shares.etp > 1:
        yield Work("moe", experts=tokens * h * 2 * shares.etp / tp, kernels=8)


def _on_device(count: Count, tp: int) -> float:
    return count.tensor / tp + count.whole
