"""Model FLOPs of one microbatch's forward, per layer and per stage.

Counted as Megatron does: two operations per multiply-add, causal attention halved, active experts only, MTP and its
output included, nothing for norms, rotations and softmax. A step is three forwards, unless weights are frozen.
Recompute never counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import Kind, Layer, foreign_cost, layer_kinds
from ppctl.geometry.parameters import Sizes, kind_parameters


@cache
def _matrices(sizes: Sizes, kind: Kind, block: str, topk: int) -> int:
    """Elements of the matrices that a token is multiplied with in a block; of the experts only `topk` count."""
    rows = [row for row in kind_parameters(sizes, kind) if row.inside(block) and row.is_matrix]
    return sum(row.size * (topk if row.experts else 1) for row in rows)


def attention_flops(model: ModelConfig, batch: int, seq: int) -> int:
    """FLOPs of projections, scores and weighted values of one layer, for `batch` sequences of `seq` tokens."""
    sizes = Sizes.of(model)
    matrices = _matrices(sizes, Kind("decoder", False), "attention", 0)
    return 2 * batch * seq * matrices + score_flops(sizes, batch, seq)


def score_flops(sizes: Sizes, batch: int, seq: int) -> int:
    """FLOPs of causal scores and weighted values, a part of `attention_flops`."""
    return batch * seq * seq * sizes.heads * (sizes.query_head + sizes.value_head)


def feed_forward_flops(model: ModelConfig, moe: bool, batch: int, seq: int) -> int:
    """FLOPs of the dense feed-forward; with `moe`, of the router, the shared expert and the chosen experts."""
    block = "moe" if moe else "feed_forward"
    return 2 * batch * seq * _matrices(Sizes.of(model), Kind("decoder", moe), block, model.moe_router_topk)


def _layer_flops(model: ModelConfig, kind: Kind, batch: int, seq: int) -> int:
    """FLOPs of one layer: none for the embedding (a look-up), the output's for the loss, and these once more for each
    MTP module. A transformers model's decoder layer has its measured FLOPs."""
    if kind.name == "decoder" and (foreign := foreign_cost(model, kind, 4, seq)) is not None:
        return round(foreign.flops.of(batch, seq))
    sizes = Sizes.of(model)
    if kind.name == "loss":
        return 2 * batch * seq * sizes.vocabulary * sizes.hidden * model.outputs
    if kind.name not in ("decoder", "mtp"):
        return 0
    layer = attention_flops(model, batch, seq) + feed_forward_flops(model, kind.moe, batch, seq)
    joined = _matrices(sizes, Kind("mtp", kind.moe), "eh_proj", 0) if kind.name == "mtp" else 0
    return layer + 2 * batch * seq * joined


def stage_flops(model: ModelConfig, layers: Iterable[Layer], micro_batch_size: int, seq_length: int) -> int:
    """Model FLOPs of one microbatch's forward through a stage, over all of its tp and cp ranks."""
    return sum(_layer_flops(model, kind, micro_batch_size, seq_length) for kind in layer_kinds(model, layers))


def stage_backward_flops(
    model: ModelConfig, layers: Iterable[Layer], micro_batch_size: int, seq_length: int
) -> int | None:
    """FLOPs of a stage's backward with frozen weights; None where it is twice the forward's. Recomputed scores do not
    count."""
    costs = [foreign_cost(model, kind, 4, seq_length) for kind in layer_kinds(model, layers)]
    total = 0.0
    for cost in costs:
        if cost is None or cost.back is None:
            return None
        token = sum(half.token + half.constant / seq_length for half in cost.back)
        pair = min(sum(half.pair for half in cost.back), 2 * cost.flops.pair)
        total += micro_batch_size * seq_length * (token + seq_length * pair)
    return round(total) if costs else None
