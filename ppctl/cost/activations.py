"""What one microbatch keeps on one device from its forward to its backward, part by part.

Knows layers, the sizes that divide their activations, and which parts recomputation drops. Must not know schedules,
ranks or devices. Sources: Korthikanti et al., arXiv 2205.05198, for the parts and what sequence parallelism divides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import NamedTuple

from ppctl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from ppctl.cost.context import Levels, exchanging, kept_more, live_more
from ppctl.cost.offloading import Piece, on_device
from ppctl.geometry.foreign_model import LayerCost
from ppctl.geometry.layers import (
    DRAWN,
    DRAWN_ON_CPU,
    LOSS_ROWS,
    Kind,
    KindName,
    Layer,
    foreign_layer,
    holds_final_norm,
    layer_kinds,
    recomputed_modules,
    recomputed_runs,
    score_rows,
)
from ppctl.geometry.offloading import offloaded_layers
from ppctl.geometry.parameters import Sizes
from ppctl.topology import ParallelSizes


class Allocator(NamedTuple):
    """What one system's blocks keep."""

    name: str
    gated_vectors: int
    """Vectors of the inner width that a gated feed-forward keeps (an ungated one keeps 2)."""
    expert_copies: int
    """Vectors of the hidden width for every chosen expert: the token's copy, and the expert's output."""
    norm_statistics: int
    """fp32 numbers per token that a norm keeps beside: RMSNorm one, LayerNorm two; 0 where they are not counted."""
    fp32_norms: bool
    """Norms are run step by step in fp32 and keep their input and the normalised input so."""
    logit_bytes: int | None
    """Per logit, from the loss's forward to its backward. None: the logits alone, as the output's product has them."""
    fused_logit_bytes: int | None
    """The same with a fused cross entropy."""
    cublas_workspaces: int
    """One per thread that multiplies: forward's and autograd's."""
    chunk_buffers: int
    """Hidden states of a microbatch that stay alive for every chunk."""
    receives: bool
    """Whether receives are posted ahead into buffers of their own."""
    backward: bool = False
    """Whether what only lives while a layer's backward runs is counted (`_in_backward`)."""
    transformer_engine: bool = False
    dummy_weight_gradients: bool = False
    """One 16-bit weight gradient for every distinct shape of a weight."""


_TORCH = Allocator("torch", 4, 2, 1, False, None, None, 2, 0, receives=True, backward=True)
_MEGATRON = Allocator("megatron", 3, 1, 0, False, 6, 4, 2, 2, receives=False, transformer_engine=True)

ALLOCATORS = {
    # ppctl's own blocks as autograd runs them on a GPU: gate, up, silu(gate) and the product; logits, whose gradient
    # takes their place; norms fused.
    "torch": _TORCH,
    # Megatron-core with Transformer Engine: fused SwiGLU, 16-bit logits beside the loss's fp32. Source: the rule of
    # tests/golden/memory_settings.json. Its native fused cross entropy keeps more by version; this is Transformer
    # Engine's, 16-bit logits and their gradient.
    "megatron": _MEGATRON,
    # Transformer Engine 2.11 keeps a dummy weight gradient per shape. Source: tests/golden/simumax_settings.json.
    "megatron_te_2.11": _MEGATRON._replace(name="megatron_te_2.11", dummy_weight_gradients=True),
}

TORCH_ON_CPU = _TORCH._replace(name="torch on the CPU", fp32_norms=True, cublas_workspaces=0)
"""torch's CPU build runs RMSNorm step by step. Checked by tests/dist/train/test_plan_memory.py."""


def for_norms(allocator: Allocator, normalization: str) -> Allocator:
    """The allocator of a model with norms of this kind: LayerNorm is one kernel everywhere, and keeps two numbers."""
    if normalization != "LayerNorm":
        return allocator
    return allocator._replace(norm_statistics=2 * allocator.norm_statistics, fp32_norms=False)


class Part(NamedTuple):
    """Bytes per token that one part of a layer keeps; `module` names the recomputation that drops it."""

    module: str
    size: float


class Setting(NamedTuple):
    """What decides over the activations of a layer, beside the layer itself."""

    micro_batch_size: int
    seq_length: int
    element: int
    """Bytes of an activation."""
    sizes: ParallelSizes = ParallelSizes(1)
    sequence_parallel: bool = False
    fused_loss: bool = False
    allocator: Allocator = ALLOCATORS["torch"]
    """Whose blocks run."""
    train: TrainConfig = TrainConfig()
    """Its `recompute_*`."""
    packed: bool = False
    """Whether documents are kept apart: attention then has a result for each, beside the one for all."""
    levels: Levels | None = None
    """Of context parallelism."""
    parallel: ParallelConfig = ParallelConfig()
    """Its `cpu_offloading_*`."""
    put_off: bool = False
    """Whether backwards are the I of split ones: they make no weight's gradient, and keep what W makes these from."""

    @property
    def wide(self) -> int:
        """Bytes of what is computed in float32 at least, as norms, scores and losses are."""
        return max(4, self.element)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.micro_batch_size * -(-self.seq_length // self.sizes.cp)

    @property
    def logit_bytes(self) -> int | None:
        """Per logit, as the allocator has it."""
        return self.allocator.fused_logit_bytes if self.fused_loss else self.allocator.logit_bytes

    @property
    def sp(self) -> int:
        """What divides the residual stream."""
        return self.sizes.tp if self.sequence_parallel else 1

    def hidden_bytes(self, model: ModelConfig) -> int:
        """Bytes of a microbatch's hidden state on one device, between blocks."""
        return self.whole_bytes(model) // self.sp

    def whole_bytes(self, model: ModelConfig) -> int:
        """Bytes of the same of all tokens that its tensor-parallel ranks have together: what blocks work with."""
        return self.tokens * model.hidden_size * self.element

    def travelling(self, model: ModelConfig) -> int:
        """Of all tokens' hidden state the bytes while it is gathered or scattered: several samples are put in order."""
        return self.whole_bytes(model) * (1 if self.micro_batch_size == 1 else 2)

    def groups(self, sizes: Sizes) -> float:
        """Groups of keys and values on one device, times tp: a rank has one at least."""
        return sizes.heads if sizes.latent else max(sizes.groups, self.sizes.tp)

    def words(self, model: ModelConfig) -> int:
        """Of the vocabulary on one device, at most."""
        return -(-model.vocab_size // self.sizes.tp)


INPUT = "input"
"""The layer's own input."""


def norm_parts(width: float, setting: Setting, module: str = INPUT) -> Iterator[Part]:
    """A norm's input (kept by `module`) and what it puts out, per token."""
    inside, outside = _norm_sizes(setting)
    yield Part(module, width * inside)
    yield Part("layernorm", width * outside)
    if setting.allocator.norm_statistics:
        yield Part("layernorm", setting.wide * setting.allocator.norm_statistics)


def attention_parts(model: ModelConfig, setting: Setting, cp_comm_type: str = "p2p") -> Iterator[Part]:
    """Input, norm, projections, scores and result of one attention."""
    size, sizes = setting.element, Sizes.of(model)
    h, heads, tp = sizes.hidden, sizes.heads, setting.sizes.tp
    yield from norm_parts(h / setting.sp, setting)
    if sizes.latent:
        inside, outside = _norm_sizes(setting)
        over = setting.sp if setting.allocator.backward else 1  # compressed vectors are those of a rank's own tokens
        latent = ((sizes.q_rank or 0) + sizes.kv_rank) / over
        yield Part("attention", latent * inside + size * (sizes.turned / over + heads * sizes.v_head / tp))
        queries = size * heads * sizes.query_head / tp
        yield Part("attention" if sizes.q_rank is None else "mla_up_proj", queries)  # without a latent they are input
        yield Part("mla_up_proj", latent * outside + size * heads * (sizes.query_head + sizes.v_head) / tp)
    else:
        groups = setting.groups(sizes)
        normed = (heads + groups) * sum(_norm_sizes(setting)) if sizes.qk_norm else 0
        plain = size * ((0 if normed else heads + groups) + heads + groups)
        statistics = setting.wide * (heads + groups) * setting.allocator.norm_statistics if normed else 0
        yield Part("attention", (sizes.head * (normed + plain) + statistics) / tp)
    ranks = exchanging(cp_comm_type, setting.sizes, setting.levels)
    by_blocks = setting.sizes.cp > ranks  # of which no scores are kept, nor a result for each document
    yield Part("core_attn", setting.wide * heads / tp if by_blocks else _scores(model, setting))
    yield Part("core_attn", size * kept_more(model, ranks, setting.sizes))
    if setting.packed and not by_blocks and ranks == 1:  # ranks that exchange heads have a result beside it anyway
        yield Part("core_attn", size * heads * sizes.value_head / tp)
    yield Part("attention", h / setting.sp * _masked(model, setting))


def _norm_sizes(setting: Setting) -> tuple[int, int]:
    """Bytes per element of a norm's input and of its output."""
    return (
        (setting.wide, setting.element + setting.wide)
        if setting.allocator.fp32_norms
        else (setting.element, setting.element)
    )


def _masked(model: ModelConfig, setting: Setting) -> int:
    """Bytes of a dropped element's mask: ppctl's own dropout draws it again."""
    return 1 if model.hidden_dropout and setting.allocator.transformer_engine else 0


def _scores(model: ModelConfig, setting: Setting) -> float:
    """The softmax's sum of each head; without a fused kernel the probabilities of every pair, and with dropout the mask
    and what it leaves.

    torch's own kernel in steps computes in float32 and keeps, of all heads, such copies of queries, keys and values,
    not these. ppctl's own attention with dropout keeps neither.
    """
    own = setting.allocator.transformer_engine
    sums = setting.wide * Sizes.of(model).heads / setting.sizes.tp
    if model.attention_dropout and not own:
        return 0.0
    if model.attention_backend != "unfused":
        return sums
    if not own:
        sizes = Sizes.of(model)
        per_head = 2 * sizes.query_head + sizes.value_head
        shared = sizes.heads - (sizes.heads if sizes.latent else sizes.groups)
        fused = sizes.heads * per_head - shared * (sizes.query_head + sizes.value_head)
        scores = sizes.heads * (setting.seq_length - 1)  # less what a fused kernel keeps of each head and token
        return sums + (setting.wide * (sizes.heads * per_head + scores) - setting.element * fused) / setting.sizes.tp
    per_pair = setting.element + (setting.element + 1 if model.attention_dropout else 0)
    return sums + model.num_attention_heads / setting.sizes.tp * setting.seq_length * per_pair


class _Dropping(NamedTuple):
    """Bytes that attention with dropout (`model/dropped_attention.py`) has beside what it reads and returns."""

    in_forward: float
    in_backward: float


def _dropping(model: ModelConfig, setting: Setting) -> _Dropping:
    """Of one block of queries its scores and probabilities, the mask, and in the backward both their gradients; there
    also those of all keys and values, which are summed in float32.
    """
    if not model.attention_dropout or not setting.allocator.backward:
        return _Dropping(0.0, 0.0)
    sizes, wide = Sizes.of(model), setting.wide
    narrow = setting.element if setting.element < wide else 0
    heads = -(-sizes.heads // setting.sizes.tp)
    length = -(-setting.seq_length // setting.sizes.cp)
    pairs = setting.micro_batch_size * heads * score_rows(setting.micro_batch_size * heads, length) * length
    groups = sizes.heads if sizes.latent else sizes.groups
    sums = setting.tokens * groups * (sizes.query_head + sizes.value_head) / setting.sizes.tp * (wide if narrow else 0)
    queries = pairs // length * sizes.query_head * setting.element  # a copy, in which heads of a group are neighbours
    return _Dropping(pairs * max(2 * wide + 1, 9), pairs * (3 * wide + 1 + narrow) + sums + queries)


def _drawn(model: ModelConfig, setting: Setting) -> float:
    """Bytes of the draws of a hidden state's dropout, and of its mask, that are there at once."""
    if not model.hidden_dropout or not setting.allocator.backward:
        return 0.0
    at_once = DRAWN_ON_CPU if setting.allocator.cublas_workspaces == 0 else DRAWN
    return 9.0 * min(at_once, setting.hidden_bytes(model) // setting.element)


def feed_forward_parts(model: ModelConfig, moe: bool, setting: Setting) -> Iterator[Part]:
    """Input, norm and inner vectors of one feed-forward; experts: the same for each chosen one."""
    size, keeps, over, sizes = setting.element, setting.allocator, setting.sizes, Sizes.of(model)
    h, vectors = sizes.hidden, keeps.gated_vectors if sizes.gated else 2
    yield from norm_parts(h / setting.sp, setting, "residual")
    if moe:
        chosen = model.moe_router_topk
        # A device's experts see the tokens of etp/tp of its own and are as wide as 1/etp: their inner width is 1/tp's.
        copies = h * (over.etp + keeps.expert_copies - 1) / over.tp
        inner = chosen * sizes.expert / over.tp
        activated = max(vectors - 2, 1)  # what the activation puts out: recomputed as moe_act
        # The router's scores in float32, and of every choice two orders of rows, its number, score and weights.
        routing = setting.wide * sizes.experts + (22 + 2 * setting.wide) * chosen
        yield Part("moe", size * (chosen * copies + (vectors - activated) * inner) + routing / setting.sp)
        yield Part("moe_act", size * activated * inner)
        yield Part("moe", size * vectors * sizes.shared / over.tp)
    else:
        yield Part("mlp", size * vectors * sizes.ffn / over.tp)
    yield Part("residual", h / setting.sp * _masked(model, setting))


def layer_parts(model: ModelConfig, kind: Kind, setting: Setting) -> list[Part]:
    """What one layer keeps per token, without recomputation."""
    hidden = model.hidden_size / setting.sp
    if kind.name == "embedding":
        return [Part(INPUT, 8)]
    if kind.name == "loss":
        per_logit = setting.logit_bytes
        per_logit = setting.element if per_logit is None else per_logit
        # Of a vocabulary that is divided: a log-sum, the place of the label's word, and whether it is here and counts.
        divided = setting.wide + 10 if setting.sizes.tp > 1 and setting.allocator.backward else 0
        states = _outputs(model) * (setting.element * hidden + per_logit * setting.words(model) + divided)
        return [Part(INPUT, states + 8 + (0 if model.mtp_num_layers else _final_norm(setting) * hidden))]
    layer = [*attention_parts(model, setting, kind.cp_comm_type), *feed_forward_parts(model, kind.moe, setting)]
    return [*layer, Part("mtp", _mtp_vectors(setting) * hidden)] if kind.name == "mtp" else layer


def _final_norm(setting: Setting) -> float:
    """Bytes per element that the final norm keeps; what it puts out is kept by what reads it."""
    inside, outside = _norm_sizes(setting)
    return inside + outside - setting.element


def _mtp_vectors(setting: Setting) -> float:
    """Bytes per element of a hidden state that an MTP module keeps beside its layer, whatever that recomputes.

    The embedding and the norm over it, both normalised vectors side by side, and a final norm. Norms in float32 keep
    the state as well.
    """
    inside, outside = _norm_sizes(setting)
    return inside + 2 * outside + _final_norm(setting) + (inside if setting.allocator.fp32_norms else 0)


_HELD_IN_FORWARD = ("layernorm", "mla_up_proj", "moe_act")
"""Modules whose outputs are made again, and held until the forward of their layer ends (`model/recompute.py`)."""


def _in_forward(model: ModelConfig, kind: KindName, moe: bool, setting: Setting, again: Mapping[str, float]) -> float:
    """Bytes that live beside what a layer keeps, at most, while its forward runs. Of one microbatch.

    A block's output and the layer's; of experts the weighted rows and their sum, before shared experts run, and behind
    these both results and their sum. What is recomputed as a whole is not looked at: its backward, which runs it again,
    has more.
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
    held += max(_drawn(model, setting), _dropping(model, setting).in_forward - behind - 2 * hidden)
    # Under sequence parallelism a block's product is one of all tokens, until it is summed and scattered.
    leaving = setting.travelling(model) + hidden if setting.sp > 1 else 0
    if not moe:
        return held + max(2 * hidden, leaving)
    size = setting.element * setting.tokens
    rows = size * model.moe_router_topk * sizes.hidden / over.tp
    shared = size * sizes.shared / over.tp
    # What is exchanged is there twice: at the experts, and arranged for the way, or arrived.
    spread = rows * (1 + over.etp) if over.etp > 1 else rows
    behind_experts = max((3 if shared else 2) * hidden, hidden + leaving if shared else 0)
    return held + max(spread + hidden - setting.allocator.gated_vectors * shared, behind_experts)


def _gathered(model: ModelConfig, setting: Setting) -> float:
    """All tokens that a divided product reads, where ranks have their own between blocks."""
    return setting.travelling(model) if setting.sp > 1 else 0


def _in_backward(model: ModelConfig, kind: Kind, setting: Setting, again: Mapping[str, float]) -> float:
    """Bytes that live beside what a layer keeps, at most, while its backward runs. Of one microbatch.

    `again` are the bytes that each recomputed module makes again. A weight's gradient lives beside the activations'
    until it is added to the others. Checked against `ppctl rehearse` by tests/torch/rehearsal/test_recipes.py.
    """
    if not setting.allocator.backward:
        return sum(again.values())
    if kind.name == "embedding":  # the table's gradient
        table = 0 if setting.put_off else setting.element * setting.words(model) * model.hidden_size
        return table + (setting.whole_bytes(model) if setting.sizes.tp > 1 else 0)  # rows of words elsewhere are masked
    if kind.name == "loss":
        return _loss_backward(model, setting) if setting.logit_bytes is None else 0.0
    feed_forward = _moe_backward if kind.moe else _dense_backward
    size, sizes, tp = setting.element * setting.tokens, Sizes.of(model), setting.sizes.tp
    hidden = setting.hidden_bytes(model)
    normed = again.get("layernorm", 0.0) / 2
    # Behind the feed-forward's, whose activations are free by then: the gradients of queries, keys, values and results.
    kept = sum(part.size for part in feed_forward_parts(model, kind.moe, setting)) * setting.tokens
    freed = kept - normed - sum(again.get(module, 0.0) for module in ("mlp", "moe", "moe_act"))
    if setting.put_off and not kind.moe:  # but for what the products read, and the gradients of what they made
        freed -= size * (2 + sizes.gated) * sizes.ffn / tp + (setting.whole_bytes(model) if setting.sp > 1 else 0)
    keys = setting.groups(sizes)
    heads = sizes.heads * (sizes.query_head + sizes.value_head) + keys * (sizes.query_head + sizes.value_head)
    more = live_more(model, kind.cp_comm_type, setting.sizes, setting.levels, setting.wide / setting.element)
    made = again.get("core_attn", 0.0) + again.get("mla_up_proj", 0.0)
    attention = (_gathered(model, setting) or hidden) + size * (heads / tp + more) - freed + made
    attention += _dropping(model, setting).in_backward
    if setting.sp > 1:  # queries, keys and values read all tokens, and have one gradient together
        attention = max(attention, _reading(model, setting, 3) - freed)
    return max(feed_forward(model, setting, again, normed), attention + 2 * normed)


def _dense_backward(model: ModelConfig, setting: Setting, again: Mapping[str, float], normed: float) -> float:
    """Of a dense feed-forward: what the last product gives its input, and then both factors, or the weight.

    Without a gate the one factor's gradient takes the place of what the last product read.
    """
    sizes, tp = Sizes.of(model), setting.sizes.tp
    inner = setting.element * setting.tokens * sizes.ffn / tp
    weight = 0 if setting.put_off else setting.element * sizes.ffn * sizes.hidden / tp
    made = again.get("mlp", 0.0)
    dropped = setting.hidden_bytes(model) if model.hidden_dropout else 0
    factors = 2 if sizes.gated else 1
    # The gathered gradient is free behind the last product, which it and that product's input wait for in I.
    gathered = setting.whole_bytes(model) if setting.sp > 1 else 0
    waiting = gathered + inner if setting.put_off else 0
    product = max(factors * inner + waiting, gathered + inner + weight + dropped, _gathered(model, setting))
    if setting.sp > 1:  # then both factors' products, whose gradients took their places
        vectors = setting.allocator.gated_vectors if sizes.gated else 2
        weights = 0 if setting.put_off else setting.travelling(model) + factors * weight + setting.hidden_bytes(model)
        reading = max(_reading(model, setting, factors), weights) - (vectors - factors) * inner
        product = max(product, reading + waiting)
    return made + product + (normed if made else 0.0)


def _reading(model: ModelConfig, setting: Setting, products: int) -> float:
    """Of a backward of divided products with one input: that input of all tokens, its gradient and one more product;
    then the gradient is scattered, for which several samples are put in order. W, and not I, reads the input."""
    whole = setting.whole_bytes(model)
    read = 0 if setting.put_off else whole
    return read + max(whole * min(products, 2), setting.travelling(model) + setting.hidden_bytes(model))


def _moe_backward(model: ModelConfig, setting: Setting, again: Mapping[str, float], normed: float) -> float:
    """Of experts: the gradients of the weighted sum's rows, then as in a dense one, beside rows that are free by then.

    Shared experts come first, and what they kept is free. Computing the layer again has its peak at the weighted sum,
    with as many bytes.
    """
    sizes, over, chosen = Sizes.of(model), setting.sizes, model.moe_router_topk
    size = setting.element * setting.tokens
    rows = size * chosen * sizes.hidden * over.etp / over.tp
    inner = size * chosen * sizes.expert / over.tp
    weight = setting.element * sizes.experts / over.ep * sizes.expert / over.etp * sizes.hidden
    shared = size * sizes.shared / over.tp
    ahead = setting.hidden_bytes(model) - setting.allocator.gated_vectors * shared + normed if shared else 0.0
    activated = again.get("moe_act", 0.0)  # its product stays until both are read
    factors = 2 * inner - rows + (inner if activated else 0.0)
    inputs = weight + rows - (setting.allocator.gated_vectors - 1) * inner
    return again.get("moe", 0.0) + ahead + max(rows, inputs, activated + max(inner + weight, factors))


def _outputs(model: ModelConfig) -> int:
    """Hidden states of which the loss layer makes logits: the decoder's, and one for each MTP module."""
    return 1 + (model.mtp_num_layers or 0)


def _loss_backward(model: ModelConfig, setting: Setting) -> float:
    """Bytes that live beside what the loss layer keeps, at most, in a backward whose logits become their gradients.

    First LOSS_ROWS rows in float32, as log-probabilities, their gradients and the logits' (`model/loss.py`), beside a
    gradient for each token's loss. Then one product after the other: gradients of its hidden state and of the weight,
    after which its logits are free. From the second on the weight's are added up: the sum so far, one more, and both.
    """
    n, h, v = setting.tokens, model.hidden_size, setting.words(model)
    hidden, weight, logits = n * h / setting.sp, v * h, n * v
    gathered = _gathered(model, setting) / setting.element  # beside its gradient, and then beside the weight's
    scattered = _reading(model, setting._replace(put_off=False), 1) / setting.element  # the output is never put off
    products = [hidden + weight + gathered, scattered if setting.sp > 1 else 0]
    for done in range(2, _outputs(model) + 1):
        products.append(done * (hidden - logits) + max(logits + 2 * weight, 3 * weight) + gathered)
    blocks = 3 if setting.sizes.tp == 1 else 1
    return max(setting.wide * (blocks * min(LOSS_ROWS, n) * v + n), setting.element * max(products))


class StageActivations(NamedTuple):
    """Bytes of one microbatch on a stage."""

    kept: int
    """From its forward to its backward."""
    in_forward: int
    """While its forward runs, at most: `kept`, or all that is there in its last layers."""
    in_backward: int
    """More while its backward runs: the largest piece that is computed again at once, with its gradients."""
    offloaded: int = 0
    """On the host from its forward to its backward, and not in `kept`."""


class StagePieces(NamedTuple):
    """What one microbatch keeps on a stage, layer by layer."""

    by_place: Mapping[int, Piece]
    """By the place in the stage of the piece's first layer."""
    offloaded: int
    """Bytes that are left to the host."""
    passed: float
    """Bytes beside layers."""


def stage_activations(
    model: ModelConfig, layers: Iterable[Layer], setting: Setting, stage: int = 0
) -> StageActivations:
    """What one microbatch keeps on a stage, on one device. An empty stage, and a recomputed layer, keep their input."""
    held, hidden = tuple(layers), setting.hidden_bytes(model)
    if not held:
        return StageActivations(hidden, hidden, 0)
    pieces, offloaded, passed = stage_pieces(model, held, setting, stage)
    whole = sum(piece.stays for piece in pieces.values())
    in_forward, in_backward, behind = whole, 0.0, 0.0
    for number, (_, (stays, forward, backward)) in enumerate(sorted(pieces.items(), reverse=True)):
        # What is behind has not had its forward; it had its backward before, and is free but for its gradient.
        in_forward = max(in_forward, whole - behind + forward)
        ahead = hidden - behind if number and setting.allocator.backward else 0.0
        in_backward = max(in_backward, backward + ahead)
        behind += stays
    return StageActivations(round(passed + whole), round(passed + in_forward), round(in_backward), offloaded)


def stage_pieces(model: ModelConfig, held: tuple[Layer, ...], setting: Setting, stage: int) -> StagePieces:
    """The same layer by layer; of layers that are recomputed together as one."""
    tokens, hidden = setting.tokens, setting.hidden_bytes(model)
    runs, modules = recomputed_runs(setting.train, stage, held), recomputed_modules(setting.train, stage)

    @cache
    def price(kind: Kind) -> tuple[float, float, float, float]:
        """Bytes that stay, that a recomputed layer would make again, and that live only in its forward or backward."""
        if (foreign := foreign_layer(model, kind)) is not None:
            return _measured(foreign.cost(setting.element), setting)
        found = layer_parts(model, kind, setting)
        again: dict[str, float] = {}
        for module, size in found:
            made = "moe" if module == "moe_act" and "moe" in modules else module
            if made in modules:
                again[made] = again.get(made, 0.0) + tokens * size
        whole = tokens * sum(part.size for part in found)
        outside = tokens * sum(part.size for part in found if part.module == "mtp")
        in_forward = _in_forward(model, kind.name, kind.moe, setting, again)
        in_backward = _in_backward(model, kind, setting, again)
        return whole - sum(again.values()), whole - outside, in_forward, in_backward

    pieces: dict[int, Piece] = {}
    for run in runs:
        priced = [price(kind) for kind in layer_kinds(model, run)]
        outside = sum(stays - made for stays, made, _, _ in priced)
        again = sum(made for _, made, _, _ in priced) - hidden
        pieces[held.index(run[0])] = Piece(hidden + outside, 0.0, again + max(more for *_, more in priced))
    recomputed = {layer for run in runs for layer in run}
    for place, (layer, kind) in enumerate(zip(held, layer_kinds(model, held), strict=True)):
        if layer not in recomputed:
            stays, _, *more = price(kind)
            pieces[place] = Piece(stays, *more)
    moved = _moved(pieces, held, setting, hidden, {run[0] for run in runs})
    decoder = sum(held[place].kind == "decoder" for place in pieces)
    pieces = on_device(pieces, moved, decoder) if moved else pieces
    return StagePieces(pieces, round(sum(moved.values())), _passed_on(model, held, setting))


def _measured(cost: LayerCost, setting: Setting) -> tuple[float, float, float, float]:
    """The same of a layer of transformers, whose recomputation makes all of it again."""
    batch, length = setting.micro_batch_size, setting.seq_length
    kept, forward, backward = (growth.of(batch, length) for growth in cost[1:])
    backward -= cost.in_backward.constant if setting.put_off else 0.0
    return kept, kept, max(0.0, forward), max(0.0, backward)


def _moved(
    pieces: Mapping[int, Piece], held: tuple[Layer, ...], setting: Setting, hidden: int, runs: Collection[Layer]
) -> dict[int, float]:
    """Bytes that pieces leave to the host, by place: all that stays, but for the stage's input, which is a message."""
    offloaded = offloaded_layers(setting.parallel, held)
    moved = {place: piece.stays for place, piece in pieces.items() if held[place] in offloaded}
    reads_input = held[0] in runs or _norm_sizes(setting)[0] == setting.element  # else a copy in float32
    if 0 in moved and reads_input:
        moved[0] -= hidden
    return moved


def _passed_on(model: ModelConfig, held: tuple[Layer, ...], setting: Setting) -> float:
    """Bytes beside layers: turning tables for a rank's own positions, which each microbatch picks; in models with MTP
    the final norm behind the decoder, and states that go to the loss."""
    tables = _tables(model, held, setting)
    if not model.mtp_num_layers:
        return tables
    normed = setting.tokens * _final_norm(setting) * model.hidden_size / setting.sp
    first = next((layer.index for layer in held if layer.kind == "mtp"), None)
    states = 0 if first is None or Layer("loss") in held else 1 + first
    return tables + normed * holds_final_norm(model, held) + states * setting.hidden_bytes(model)


def _tables(model: ModelConfig, held: tuple[Layer, ...], setting: Setting) -> float:
    """Cosines and sines for the positions of ranks that share sequences: others read one table for all."""
    turns = model.position_embedding_type == "rope" and any(layer.kind in ("decoder", "mtp") for layer in held)
    if setting.sizes.cp == 1 or not turns or not setting.allocator.backward:
        return 0.0
    sizes = Sizes.of(model)
    width = sizes.turned if sizes.latent else int(sizes.head * model.rotary_percent)
    return 2 * setting.element * width * -(-setting.seq_length // setting.sizes.cp)
