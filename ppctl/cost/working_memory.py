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
"""Modules of which all that is made again are outputs, held till their layer's forward ends (`model/recompute.py`)."""


def in_forward(model: ModelConfig, kind: KindName, moe: bool, setting: Setting, again: Mapping[str, float]) -> float:
    """Bytes that live beside what a layer keeps, at most, while its forward runs. Of one microbatch.

    A block's output and the layer's; of experts the results on their way and their sums, before shared experts run, and
    after these both results and their sum. What is recomputed as a whole is not looked at: its backward, which runs it
    again, has more.
    """
    if not setting.allocator.backward or kind == "embedding":
        return 0.0
    if kind == "loss":  # a block of logits in float32 and its log-probabilities
        blocks = 2 if setting.sizes.tp == 1 else 1
        block = blocks * setting.wide * min(LOSS_ROWS, setting.tokens) * setting.words(model)
        return max(block, _gathered(model, setting)) if setting.logit_bytes is None else 0.0
    hidden, sizes, over = setting.hidden_bytes(model), Sizes.of(model), setting.sizes
    held = sum(again.get(module, 0.0) for module in _HELD_IN_FORWARD)
    behind = sum(part.size for part in feed_forward_parts(model, moe, setting)) * setting.tokens
    draws = drawn(setting, hidden // setting.element) if model.hidden_dropout else 0.0
    held += max(draws, _dropping(model, setting)[0] - behind - 2 * hidden)
    # Under sequence parallelism a block's product is one of all tokens, until it is summed and scattered.
    leaving = setting.travelling(model) + hidden if setting.sp > 1 else 0
    if not moe:
        return held + max(2 * hidden, leaving)
    size = setting.element * setting.tokens
    rows = size * model.moe_router_topk * sizes.hidden / over.tp
    shared = size * sizes.shared / over.tp
    if "moe_act" in again:
        held += size * model.moe_router_topk * sizes.expert / over.tp
    # What is exchanged is there twice: at the experts, and arranged for the way, or arrived; else it is with its sums.
    runs = expert_runs(model)
    summed = rows * runs.most / model.moe_router_topk if runs.size > 1 and runs.most > 1 else 0
    spread = rows * (1 + over.etp) if over.ep * over.etp > 1 else rows + summed
    if "experts" in again:  # which are not in what the layer keeps
        spread = max(spread, again["experts"])
    behind_experts = max((3 if shared else 2) * hidden, hidden + leaving if shared else 0)
    return held + max(spread + hidden - (2 + sizes.gated) * shared, behind_experts)


def in_backward(model: ModelConfig, kind: Kind, setting: Setting, again: Mapping[str, float]) -> float:
    """Bytes that live beside what a layer keeps, at most, while its backward runs. Of one microbatch. `again` are the
    bytes that each recomputed module makes again. A weight's gradient lives beside the activations' until it is added
    to the others. Checked against `ppctl rehearse` by tests/torch/rehearsal/test_recipes.py."""
    if not setting.allocator.backward:
        return sum(again.values())
    if kind.name == "embedding":  # the table's gradient
        table = 0 if setting.deferred else setting.element * setting.words(model) * model.hidden_size
        return table + (setting.whole_bytes(model) if setting.sizes.tp > 1 else 0)  # rows of words elsewhere are masked
    if kind.name == "loss":
        return _loss_backward(model, setting) if setting.logit_bytes is None else 0.0
    feed_forward = _moe_backward if kind.moe else _dense_backward
    size, sizes, tp = setting.element * setting.tokens, Sizes.of(model), setting.sizes.tp
    hidden = setting.hidden_bytes(model)
    normed = again.get("layernorm", 0.0) / 2
    # After the feed-forward's, whose activations are free by then: the gradients of queries, keys, values and results.
    kept = sum(part.size for part in feed_forward_parts(model, kind.moe, setting)) * setting.tokens
    freed = kept - normed - sum(again.get(module, 0.0) for module in ("mlp", "moe", "experts", "moe_act"))
    if setting.deferred and not kind.moe:  # but for what the products read, and the gradients of what they made
        freed -= size * (2 + sizes.gated) * sizes.ffn / tp + (setting.whole_bytes(model) if setting.sp > 1 else 0)
    keys = setting.groups(sizes)
    heads = sizes.heads * (sizes.query_head + sizes.value_head) + keys * (sizes.query_head + sizes.value_head)
    more = live_more(model, kind.cp_comm_type, setting.sizes, setting.levels, setting.wide / setting.element)
    made = again.get("core_attn", 0.0) + again.get("mla_up_proj", 0.0)
    attention = (_gathered(model, setting) or hidden) + size * (heads / tp + more) - freed + made
    attention += _dropping(model, setting)[1]
    if setting.sp > 1:  # queries, keys and values read all tokens, and have one gradient together
        attention = max(attention, _reading(model, setting, 3) - freed)
    return max(feed_forward(model, setting, again, normed), attention + 2 * normed)


def _dense_backward(model: ModelConfig, setting: Setting, again: Mapping[str, float], normed: float) -> float:
    """Bytes of a dense feed-forward's backward: the last product's input's gradient, then both factors, or the weight.
    Without a gate the one factor's gradient takes the place of what the last product read."""
    sizes, tp = Sizes.of(model), setting.sizes.tp
    inner = setting.element * setting.tokens * sizes.ffn / tp
    weight = 0 if setting.deferred else setting.element * sizes.ffn * sizes.hidden / tp
    made = again.get("mlp", 0.0)
    dropped = setting.hidden_bytes(model) if model.hidden_dropout else 0
    factors = 2 if sizes.gated else 1
    # The gathered gradient is free after the last product, which it and that product's input wait for in I.
    gathered = setting.whole_bytes(model) if setting.sp > 1 else 0
    waiting = gathered + inner if setting.deferred else 0
    product = max(factors * inner + waiting, gathered + inner + weight + dropped, _gathered(model, setting))
    if setting.sp > 1:  # then both factors' products, whose gradients took their places
        # Their input's gradient of all tokens is summed over the ranks beside the weights' products.
        summing = 2 * setting.whole_bytes(model) + setting.hidden_bytes(model)
        weights = 0 if setting.deferred else summing + factors * weight
        reading = max(_reading(model, setting, factors), weights) - inner
        product = max(product, reading + waiting)
    return made + product + (normed if made else 0.0)


def _moe_backward(model: ModelConfig, setting: Setting, again: Mapping[str, float], normed: float) -> float:
    """Bytes of the experts' backward: gradients of the weighted sum's rows, then as in a dense one, without freed rows.
    Shared experts come first, and what they kept is free. Computing the layer again has its peak at the weighted sum,
    with as many bytes."""
    sizes, over, chosen = Sizes.of(model), setting.sizes, model.moe_router_topk
    size = setting.element * setting.tokens
    rows = size * chosen * sizes.hidden * over.etp / over.tp
    arranged = 2 * rows if over.ep * over.etp > 1 else rows
    inner = size * chosen * sizes.expert / over.tp
    weight = setting.element * sizes.experts / over.ep * sizes.expert / over.etp * sizes.hidden
    shared = size * sizes.shared / over.tp
    ahead = setting.hidden_bytes(model) - (2 + sizes.gated) * shared + normed if shared else 0.0
    activated = again.get("moe_act", 0.0)  # its product stays until both are read
    factors = 3 * inner + (inner if activated else 0.0)
    made = again.get("experts", 0.0) + activated
    inputs = weight + 2 * rows - (1 + sizes.gated) * inner
    least = made + max(rows + inner + weight, factors)
    return again.get("moe", 0.0) + ahead + max(arranged, inputs + again.get("experts", 0.0), least)


def _loss_backward(model: ModelConfig, setting: Setting) -> float:
    """Bytes that live beside what the loss layer keeps, at most, in a backward whose logits become their gradients.

    First LOSS_ROWS rows in float32, as log-probabilities, their gradients and the logits' (`model/loss.py`), beside a
    gradient for each token's loss. Then one product after the other: gradients of its hidden state and of the weight,
    after which its logits are free. From the second on the weight's are added up: the sum so far, one more, and both.
    """
    n, h, v = setting.tokens, model.hidden_size, setting.words(model)
    hidden, weight, logits = n * h / setting.sp, v * h, n * v
    summing = 2 * n * h if setting.sp > 1 else 0  # all tokens and their gradient, which is summed beside the weight's
    scattered = _reading(model, setting._replace(deferred=False), 1) / setting.element  # the output is never deferred
    products = [hidden + weight + summing, scattered if setting.sp > 1 else 0]
    for done in range(2, model.outputs + 1):
        products.append(done * (hidden - logits) + max(logits + 2 * weight, 3 * weight) + summing)
    blocks = 3 if setting.sizes.tp == 1 else 1
    return max(setting.wide * (blocks * min(LOSS_ROWS, n) * v + n), setting.element * max(products))


def _gathered(model: ModelConfig, setting: Setting) -> float:
    """All tokens that a divided product reads, if ranks have their own between blocks."""
    return setting.travelling(model) if setting.sp > 1 else 0


def _reading(model: ModelConfig, setting: Setting, products: int) -> float:
    """Bytes of a backward of divided products with one input: that of all tokens, its gradient and one more product;
    then the gradient is scattered, for which several samples are put in order. W, and not I, reads the input."""
    whole = setting.whole_bytes(model)
    read = 0 if setting.deferred else whole
    return read + max(whole * min(products, 2), setting.travelling(model) + setting.hidden_bytes(model))


def _dropping(model: ModelConfig, setting: Setting) -> tuple[float, float]:
    """Bytes that attention with dropout (`model/dropped_attention.py`) has beside what it reads and returns, in its
    forward and in its backward: of a block of queries scores and probabilities, the mask, and in the backward both
    their gradients; there also those of all keys and values, which are summed in float32."""
    if not model.attention_dropout or not setting.allocator.backward:
        return 0.0, 0.0
    sizes, wide = Sizes.of(model), setting.wide
    narrow = setting.element if setting.element < wide else 0
    heads = -(-sizes.heads // setting.sizes.tp)
    length = -(-setting.seq_length // setting.sizes.cp)
    pairs = setting.micro_batch_size * heads * score_rows(setting.micro_batch_size * heads, length) * length
    groups = sizes.heads if sizes.latent else sizes.groups
    sums = setting.tokens * groups * (sizes.query_head + sizes.value_head) / setting.sizes.tp * (wide if narrow else 0)
    queries = pairs // length * sizes.query_head * setting.element  # a copy, in which heads of a group are neighbours
    return pairs * max(2 * wide + 1, 9), pairs * (3 * wide + 1 + narrow) + sums + queries


def drawn(setting: Setting, elements: int) -> float:
    """Bytes of the draws of dropout for so many elements, and of its mask, that are there at once."""
    at_once = DRAWN_ON_CPU if setting.allocator.cublas_workspaces == 0 else DRAWN
    return 9.0 * min(at_once, elements) if setting.allocator.backward else 0.0
