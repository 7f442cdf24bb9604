"""Bytes that are on one device only while a layer's forward or backward runs, beside what the layer keeps.

`ppctl rehearse` measures it.
"""

from __future__ import annotations

from collections.abc import Mapping

from ppctl.config.schema import ModelConfig
from ppctl.cost.context_parallelism import live_more
from ppctl.cost.layer_parts import feed_forward_parts
from ppctl.cost.setting import Setting
from ppctl.geometry.expert_reach import expert_runs
from ppctl.geometry.layers import DRAWN, DRAWN_ON_CPU, LOSS_ROWS, Kind, KindName, score_rows
from ppctl.geometry.parameters import Sizes

_HELD_IN_FORWARD = ("layernorm", "mla_up_proj")
"""Modules that make nothing but outputs again, held until their layer's forward ends (`model/recompute.py`)."""


def in_forward(model: ModelConfig, kind: KindName, moe: bool, setting: Setting, again: Mapping[str, float]) -> float:
    """The most bytes of one microbatch that live while a layer's forward runs, beside those that it keeps.

    These are a block's output and the layer's; with experts, the results on their way and their sums, and once shared
    experts have run, both results and their sum. Or, where SwiGLU is computed step by step (a trial on the device
    tells), silu of the gate. Layers recomputed as a whole are left out: their backward needs more.
    """
    if not setting.allocator.backward or kind == "embedding":
        return 0.0
    if kind == "loss":  # a block of logits in float32 and its log-probabilities
        blocks = 2 if setting.sizes.tp == 1 else 1
        block = blocks * setting.wide_bytes * min(LOSS_ROWS, setting.tokens) * setting.words(model)
        return max(block, _gathered(model, setting)) if setting.logit_bytes is None else 0.0
    hidden, sizes, axes = setting.hidden_bytes(model), Sizes.of(model), setting.sizes
    held = sum(again.get(module, 0.0) for module in _HELD_IN_FORWARD)
    behind = sum(part.size for part in feed_forward_parts(model, moe, setting)) * setting.tokens
    draws = drawn(setting, hidden // setting.element) if model.hidden_dropout else 0.0
    held += max(draws, _dropping(model, setting)[0] - behind - 2 * hidden)
    # Under sequence parallelism a block's product has all tokens, until it is summed and scattered.
    leaving = setting.travelling(model) + hidden if setting.sp > 1 else 0
    size = setting.element * setting.tokens
    silu = size * sizes.gated / axes.tp  # for each element of the inner width
    if not moe:
        return held + max(2 * hidden, leaving, silu * sizes.ffn)
    rows = size * model.moe_router_topk * sizes.hidden / axes.tp
    shared = size * sizes.shared / axes.tp
    if "moe_act" in again:
        held += size * model.moe_router_topk * sizes.expert / axes.tp
    # Exchanged rows exist twice: at the experts, and in sending order or arrived; without exchange, with their sums.
    runs = expert_runs(model)
    summed = rows * runs.most / model.moe_router_topk if runs.size > 1 and runs.most > 1 else 0
    spread = rows * (1 + axes.etp) if axes.ep * axes.etp > 1 else rows + summed
    if "experts" in again:  # recomputed experts are not among the kept bytes
        spread = max(spread, again["experts"])
    spread = max(spread + hidden, silu * model.moe_router_topk * sizes.expert + again.get("experts", 0.0))
    behind_experts = max((3 if shared else 2) * hidden, hidden + max(leaving, silu * sizes.shared) if shared else 0)
    return held + max(spread - (2 + sizes.gated) * shared, behind_experts)


def in_backward(model: ModelConfig, kind: Kind, setting: Setting, again: Mapping[str, float]) -> float:
    """The most bytes of one microbatch that live while a layer's backward runs, beside those that it keeps. `again` are
    the bytes that each recomputed module makes again. A weight's gradient lives beside the activations' until it is
    accumulated. Checked against `ppctl rehearse` by tests/torch/rehearsal/test_recipes.py."""
    if not setting.allocator.backward:
        return sum(again.values())
    if kind.name == "embedding":  # the table's gradient
        table = 0 if setting.deferred else setting.element * setting.words(model) * model.hidden_size
        # rows of other ranks' tokens are masked
        return table + (setting.whole_bytes(model) if setting.sizes.tp > 1 else 0)
    if kind.name == "loss":
        return _loss_backward(model, setting) if setting.logit_bytes is None else 0.0
    feed_forward = _moe_backward if kind.moe else _dense_backward
    size, sizes, tp = setting.element * setting.tokens, Sizes.of(model), setting.sizes.tp
    hidden = setting.hidden_bytes(model)
    normed = again.get("layernorm", 0.0) / 2
    # After the feed-forward's backward, whose activations are free: the gradients of queries, keys, values and results.
    kept = sum(part.size for part in feed_forward_parts(model, kind.moe, setting)) * setting.tokens
    freed = kept - normed - sum(again.get(module, 0.0) for module in ("mlp", "moe", "experts", "moe_act"))
    if setting.deferred and not kind.moe:  # except the products' inputs, and the gradients of their results
        freed -= size * (2 + sizes.gated) * sizes.ffn / tp + (setting.whole_bytes(model) if setting.sp > 1 else 0)
    keys = setting.groups(sizes)
    heads = sizes.heads * (sizes.query_head + sizes.value_head) + keys * (sizes.query_head + sizes.value_head)
    more = live_more(model, kind.cp_comm_type, setting.sizes, setting.levels, setting.wide_bytes / setting.element)
    made = again.get("core_attn", 0.0) + again.get("mla_up_proj", 0.0)
    attention = (_gathered(model, setting) or hidden) + size * (heads / tp + more) - freed + made
    attention += _dropping(model, setting)[1]
    if setting.sp > 1:  # queries, keys and values read all tokens, and share one gradient
        attention = max(attention, _reading(model, setting, 3) - freed)
    return max(feed_forward(model, setting, again, normed), attention + 2 * normed)


def _dense_backward(model: ModelConfig, setting: Setting, again: Mapping[str, float], normed: float) -> float:
    """Bytes of a dense feed-forward's backward: the gradient of the last product's input, then of both factors, or of
    the weight. Without a gate the gradient takes the place of the last product's input."""
    sizes, tp = Sizes.of(model), setting.sizes.tp
    inner = setting.element * setting.tokens * sizes.ffn / tp
    weight = 0 if setting.deferred else setting.element * sizes.ffn * sizes.hidden / tp
    made = again.get("mlp", 0.0)
    dropped = setting.hidden_bytes(model) if model.hidden_dropout else 0
    factors = 2 if sizes.gated else 1
    # The gathered gradient is free after the last product; in I it and that product's input wait for W.
    gathered = setting.whole_bytes(model) if setting.sp > 1 else 0
    waiting = gathered + inner if setting.deferred else 0
    product = max(factors * inner + waiting, gathered + inner + weight + dropped, _gathered(model, setting))
    if setting.sp > 1:  # then both factors' products, in place of their gradients
        # The gradient of their input, of all tokens, is summed over the ranks beside the weights' products.
        summing = 2 * setting.whole_bytes(model) + setting.hidden_bytes(model)
        weights = 0 if setting.deferred else summing + factors * weight
        reading = max(_reading(model, setting, factors), weights) - inner
        product = max(product, reading + waiting)
    return made + product + (normed if made else 0.0)


def _moe_backward(model: ModelConfig, setting: Setting, again: Mapping[str, float], normed: float) -> float:
    """Bytes of the experts' backward: gradients of the weighted sum's rows, then as in a dense one, without freed rows.
    Shared experts come first, and their kept bytes are free. Recomputation peaks at the weighted sum, equally high."""
    sizes, axes, chosen = Sizes.of(model), setting.sizes, model.moe_router_topk
    size = setting.element * setting.tokens
    rows = size * chosen * sizes.hidden * axes.etp / axes.tp
    arranged = 2 * rows if axes.ep * axes.etp > 1 else rows
    inner = size * chosen * sizes.expert / axes.tp
    weight = setting.element * sizes.experts / axes.ep * sizes.expert / axes.etp * sizes.hidden
    shared = size * sizes.shared / axes.tp
    ahead = setting.hidden_bytes(model) - (2 + sizes.gated) * shared + normed if shared else 0.0
    activated = again.get("moe_act", 0.0)  # the product stays until both are read
    factors = 3 * inner + (inner if activated else 0.0)
    made = again.get("experts", 0.0) + activated
    inputs = weight + 2 * rows - (1 + sizes.gated) * inner
    least = made + max(rows + inner + weight, factors)
    return again.get("moe", 0.0) + ahead + max(arranged, inputs + again.get("experts", 0.0), least)


def _loss_backward(model: ModelConfig, setting: Setting) -> float:
    """The most bytes that live while the loss's backward runs, beside those that it keeps; logits become their
    gradients.

    First LOSS_ROWS rows in float32, as log-probabilities, their gradients and the logits' (`model/loss.py`), beside a
    gradient for each token's loss. Then one product after the other: gradients of its hidden state and of the weight,
    after which its logits are free. From the second on, weight gradients are added: the sum so far, the new one, and
    the new sum.
    """
    n, h, v = setting.tokens, model.hidden_size, setting.words(model)
    hidden, weight, logits = n * h / setting.sp, v * h, n * v
    summing = 2 * n * h if setting.sp > 1 else 0  # all tokens and their gradient, which is summed beside the weight's
    scattered = _reading(model, setting._replace(deferred=False), 1) / setting.element  # the output is never deferred
    products = [hidden + weight + summing, scattered if setting.sp > 1 else 0]
    for done in range(2, model.outputs + 1):
        products.append(done * (hidden - logits) + max(logits + 2 * weight, 3 * weight) + summing)
    blocks = 3 if setting.sizes.tp == 1 else 1
    return max(setting.wide_bytes * (blocks * min(LOSS_ROWS, n) * v + n), setting.element * max(products))


def _gathered(model: ModelConfig, setting: Setting) -> float:
    """Bytes of all tokens that a divided product reads, if ranks have only their own between blocks."""
    return setting.travelling(model) if setting.sp > 1 else 0


def _reading(model: ModelConfig, setting: Setting, products: int) -> float:
    """Bytes of the backward of divided products that share one input: the input of all tokens, its gradient and one
    more product; then the gradient is scattered, and reordered for several samples. W, and not I, reads the input."""
    whole = setting.whole_bytes(model)
    read = 0 if setting.deferred else whole
    return read + max(whole * min(products, 2), setting.travelling(model) + setting.hidden_bytes(model))


def _dropping(model: ModelConfig, setting: Setting) -> tuple[float, float]:
    """(forward, backward): bytes of attention with dropout (`model/dropped_attention.py`) beside its inputs and
    results: for a block of queries scores, probabilities and mask; in the backward also their gradients, and sums in
    float32 of the gradients of all keys and values."""
    if not model.attention_dropout or not setting.allocator.backward:
        return 0.0, 0.0
    sizes, float32 = Sizes.of(model), setting.wide_bytes
    narrow = setting.element if setting.element < float32 else 0
    heads = -(-sizes.heads // setting.sizes.tp)
    length = -(-setting.seq_length // setting.sizes.cp)
    pairs = setting.micro_batch_size * heads * score_rows(setting.micro_batch_size * heads, length) * length
    groups = sizes.heads if sizes.latent else sizes.groups
    sums = (
        setting.tokens * groups * (sizes.query_head + sizes.value_head) / setting.sizes.tp * (float32 if narrow else 0)
    )
    queries = pairs // length * sizes.query_head * setting.element  # a copy with neighbouring heads of a group
    return pairs * max(2 * float32 + 1, 9), pairs * (3 * float32 + 1 + narrow) + sums + queries


def drawn(setting: Setting, elements: int) -> float:
    """Bytes of dropout's draws and mask that exist at once when it is applied to `elements` elements."""
    at_once = DRAWN_ON_CPU if setting.allocator.cublas_workspaces == 0 else DRAWN
    return 9.0 * min(at_once, elements) if setting.allocator.backward else 0.0
