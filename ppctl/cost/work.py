"""What one device does for one microbatch in one layer: operations, bytes through memory, bytes over links.

Knows the parts of layers and the sizes that divide them. Must not know rates, schedules or stages. Parts go by the
names that recomputation uses, so that what is done again has a price.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.activations import Setting
from ppctl.cost.flops import attention_flops, feed_forward_flops, score_flops
from ppctl.cost.parameters import ways
from ppctl.geometry.layers import Kind
from ppctl.geometry.parameters import Parameter, Sizes, kind_parameters
from ppctl.topology import ParallelSizes


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


def layer_work(model: ModelConfig, kind: Kind, setting: Setting) -> list[Work]:
    """All parts of one layer."""
    h, tokens, element, tp = model.hidden_size, setting.tokens, setting.element, setting.sizes.tp
    if kind.name == "embedding":
        rows = model.vocab_size / tp
        return [Work("embedding", traffic=tokens * 3 * h * element, weights=rows * h, kernels=4)]
    if kind.name == "loss":
        columns = model.vocab_size / tp
        logits = tokens * columns * (1 + (model.mtp_num_layers or 0))
        # Logits are written, widened, and read twice for a log-softmax.
        return [
            Work("layernorm", traffic=2 * tokens * h * element / setting.sp, kernels=2),
            Work("loss", matmul=2 * logits * h, inputs=tokens * h, weights=columns * h),
            Work("loss", traffic=12 * logits, kernels=10),
        ]
    works = [*_attention(model, setting), *_feed_forward(model, kind.moe, setting)]
    works.append(Work("layernorm", traffic=10 * tokens * h * element / setting.sp, kernels=4))
    if tp > 1:
        # Before and after each of the two blocks: a gather and a scatter of the residual stream.
        works.append(Work("tensor", tensor=4 * tokens * h * element * (tp - 1) / tp))
    if kind.name == "mtp":
        works.append(
            Work("mtp", matmul=4 * tokens * h * h, traffic=8 * tokens * h * element, weights=2 * h * h, kernels=6)
        )
    return works


def _attention(model: ModelConfig, setting: Setting) -> Iterator[Work]:
    sizes, tokens, element = Sizes.of(model), setting.tokens, setting.element
    h, heads, tp, over = sizes.hidden, sizes.heads, setting.sizes.tp, setting.sizes.tp * setting.sizes.cp
    flops = attention_flops(model, setting.micro_batch_size, setting.seq_length) / over
    scores = score_flops(sizes, setting.micro_batch_size, setting.seq_length) / over
    rows = _rows(sizes, "attention", moe=False)
    up = 2 * tokens * _held([row for row in rows if row.recomputed and row.is_matrix], setting.sizes)
    if sizes.latent:
        moved = 2 * heads * (2 * sizes.query_head + sizes.v_head) / tp
        latent = tokens * ((sizes.q_rank or 0) + sizes.kv_rank)
        yield Work("mla_up_proj", matmul=up, inputs=latent, traffic=tokens * moved * element, kernels=10)
        keys = heads * (sizes.query_head + sizes.v_head) / tp
    else:
        yield Work("attention", traffic=2 * tokens * (heads + sizes.groups) * sizes.head / tp * element, kernels=6)
        keys = 2 * sizes.groups * sizes.head / tp
    inputs, weights = tokens * (h + heads * sizes.value_head / tp), _held(rows, setting.sizes)
    yield Work("attention", matmul=flops - scores - up, inputs=inputs, weights=weights, kernels=4)
    yield Work("core_attn", scores=scores, context=tokens * keys * element * (setting.sizes.cp - 1), kernels=2)


def _feed_forward(model: ModelConfig, moe: bool, setting: Setting) -> Iterator[Work]:
    sizes, over, tokens, element = Sizes.of(model), setting.sizes, setting.tokens, setting.element
    h, tp, matrices = sizes.hidden, over.tp, 3 if sizes.gated else 2
    flops = feed_forward_flops(model, moe, setting.micro_batch_size, setting.seq_length) / (tp * over.cp)
    block = "moe" if moe else "feed_forward"
    weights = _held([row for row in _rows(sizes, block, moe) if row.role in ("matrix", "expert")], over)
    if not moe:
        width = sizes.ffn / tp
        yield Work("mlp", matmul=flops, inputs=tokens * (h + width), weights=weights, kernels=3)
        yield Work("mlp", traffic=matrices * tokens * width * element, kernels=2)
        return
    inner = model.moe_router_topk * sizes.expert / tp
    copies = model.moe_router_topk * h * over.etp / tp
    yield Work("moe", matmul=flops, inputs=tokens * (copies + inner), weights=weights, kernels=12)
    moved = 2 * copies + copies + h / tp
    yield Work("moe", traffic=tokens * (moved * element + 16 * sizes.experts / tp), kernels=30)
    yield Work("moe_act", traffic=matrices * tokens * (inner + sizes.shared / tp) * element, kernels=3)
    if over.ep * over.etp > 1:
        yield Work("moe", experts=tokens * h * 2 * over.etp / tp, kernels=8)


def _rows(sizes: Sizes, block: str, moe: bool) -> list[Parameter]:
    return [row for row in kind_parameters(sizes, Kind("decoder", moe)) if row.inside(block)]


def _held(rows: list[Parameter], sizes: ParallelSizes) -> float:
    """Elements on one device."""
    return sum(row.elements / ways(row.axes, sizes) for row in rows)
