"""What a parameter is: one table for ppctl's own decoder, from which counts, shapes, names and rules are read.

Knows every block's parameters: name, shape, role, which dim each parallel axis splits, what its gradient is on
tensor-parallel ranks, how it starts, whether it decays and with which module it is recomputed. Must not know bytes,
ranks, modules of torch or files. A parameter of `ppctl/model` without a row here is refused when a stage is built.

Rows are made per kind of layer, once for each set of sizes; a layer's experts are one row with their number. Rows by
stage and by canonical name: `canonical_names.py`.

Sources: Llama and Mixtral as published (GQA, SwiGLU, RMSNorm); DeepSeek-V2/V3 technical reports for multi-head latent
attention, shared experts and the MTP module (two norms, a projection 2h -> h, one decoder layer, a final norm); GPT-3
for LayerNorm, biases, feed-forwards without a gate and learned positions. What tensor parallelism splits, and whose
gradients it leaves incomplete: Megatron-LM, `core/transformer` and `finalize_model_grads.py` (0.20); unlike there, the
projection of an MTP module is whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from math import prod
from typing import Literal, NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import Kind, expert_width, head_dim, query_groups

Role = Literal["matrix", "expert", "router", "embedding", "norm", "bias", "correction"]
"""matrix: of a product with activations, and expert: the same of a routed expert; router: scores of experts; bias:
added to a product or a norm; correction: what balances a router, moved once a step without a gradient."""

Gradient = Literal["complete", "tokens", "heads", "none"]
"""What a tensor-parallel rank has after its backward. complete: all of the gradient of what it holds. tokens: that of
its own tokens under sequence parallelism, to be summed over tp then. heads: that of its own heads, to be summed over tp
always. none: it is trained without one. What tp cannot split after all (`units`) has that of its own heads."""

Start = Literal["ones", "zeros", "normal", "residual"]
"""normal: drawn with init_method_std; residual: with init_method_std / sqrt(2 x num_layers), since every layer adds two
such projections to the residual stream (Radford et al. 2019, GPT-2)."""

Splits = tuple[tuple[str, int], ...]
"""(axis, dim) of every parallel axis that splits a parameter; on all others it is whole."""

EMBEDDING = "tok_embeddings.weight"
MTP_EMBEDDING = "mtp.tok_embeddings.weight"
"""The copy of the embedding beside the MTP modules: another use of it."""
OUTPUT = "output.weight"


class Parameter(NamedTuple):
    """A row: one parameter of a layer, or one of every expert of a layer."""

    name: str
    """Canonical, with {layer} and {expert} for their indexes: `layers.{layer}.moe.experts.{expert}.w1.weight`."""
    shape: tuple[int, ...]
    """Of one; modules stack experts, [experts, *shape]."""
    role: Role
    splits: Splits = ()
    """Dims are those of the stack where there is one: its dim 0 are the experts."""
    gradient: Gradient = "complete"
    start: Start = "normal"
    recomputed: str | None = None
    """The entry of train.recompute_modules that computes with it again."""
    experts: int = 0
    """How many of them a layer has, each an expert's; 0 for a parameter that is none."""
    copy_of: str | None = None
    """The canonical name of the parameter that this is a further use of."""
    units: int = 0
    """Of the dim that tp splits: the parts that cannot be divided (groups of keys and values); 0 where all can be."""

    @property
    def size(self) -> int:
        """Elements of one."""
        return prod(self.shape)

    @property
    def elements(self) -> int:
        """Elements of all in a layer."""
        return self.size * (self.experts or 1)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with it, and it is no use of an embedding."""
        return self.role in ("matrix", "expert", "router")

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms, biases and embeddings in any of their uses."""
        return self.is_matrix

    @property
    def axes(self) -> tuple[str, ...]:
        """The parallel axes that split it; `tp/8` does where it divides 8 units, `tp:37` cuts 37 words into runs."""
        if self.units:
            return tuple(f"{axis}/{self.units}" if axis == "tp" else axis for axis, _ in self.splits)
        words = self.name in (EMBEDDING, MTP_EMBEDDING, OUTPUT)
        return tuple(f"{axis}:{self.shape[dim]}" if words else axis for axis, dim in self.splits)

    def splits_over(self, ranks: int) -> bool:
        """Whether so many ranks can split it; where there are fewer units than ranks, each has the whole."""
        return not self.units or self.units % ranks == 0

    def inside(self, block: str) -> bool:
        """Whether it is in this block of a decoder layer: `attention`, `feed_forward`, `moe`."""
        return f".{block}." in self.name

    def called(self, layer: int = 0) -> str:
        """The canonical name in layer `layer`; of experts the name of their stack."""
        name = stack_name(self.name) if self.experts else self.name
        return name.format(layer=layer)


def stack_name(pattern: str) -> str:
    """The name under which a module holds all experts' tensors: `...experts.w1` of `...experts.{expert}.w1.weight`."""
    return pattern.replace(".{expert}", "").removesuffix(".weight")


class Sizes(NamedTuple):
    """What of a ModelConfig decides over its parameters: hashable, so that rows are made once."""

    hidden: int
    vocabulary: int
    heads: int
    groups: int
    head: int
    ffn: int
    expert: int
    shared: int
    experts: int
    positions: int
    """Rows of the table of learned positions; 0 without one."""
    latent: bool
    q_rank: int | None
    kv_rank: int
    qk_head: int
    turned: int
    v_head: int
    gated: bool
    biases: bool
    qkv_bias: bool
    qk_norm: bool
    norm_bias: bool
    router_bias: bool
    tied: bool

    @property
    def query_head(self) -> int:
        """Width of one head's query and key."""
        return self.qk_head + self.turned if self.latent else self.head

    @property
    def value_head(self) -> int:
        """Width of one head's value and result."""
        return self.v_head if self.latent else self.head

    @classmethod
    def of(cls, model: ModelConfig) -> Sizes:
        """The sizes of a model."""
        learned = model.position_embedding_type == "learned_absolute"
        return cls(
            hidden=model.hidden_size,
            vocabulary=model.vocab_size,
            heads=model.num_attention_heads,
            groups=query_groups(model),
            head=head_dim(model),
            ffn=model.ffn_hidden_size,
            expert=expert_width(model),
            shared=model.moe_shared_expert_intermediate_size or 0,
            experts=model.num_moe_experts or 0,
            positions=model.max_position_embeddings if learned else 0,
            latent=model.multi_latent_attention,
            q_rank=model.q_lora_rank,
            kv_rank=model.kv_lora_rank,
            qk_head=model.qk_head_dim,
            turned=model.qk_pos_emb_head_dim,
            v_head=model.v_head_dim,
            gated=model.gated_linear_unit,
            biases=model.add_bias_linear,
            qkv_bias=model.add_qkv_bias or model.add_bias_linear,
            qk_norm=model.qk_layernorm,
            norm_bias=model.normalization == "LayerNorm",
            router_bias=model.moe_router_enable_expert_bias,
            tied=model.share_embeddings_and_output_weights,
        )


# --- the table -------------------------------------------------------------------------------------------------------


@cache
def kind_parameters(sizes: Sizes, kind: Kind) -> tuple[Parameter, ...]:
    """The rows of one layer, in canonical order; of a loss the output, without the final norm."""
    if kind.name == "decoder":
        return tuple(_inside("layers.{layer}", _decoder(sizes, kind.moe)))
    if kind.name == "mtp":
        return tuple(_inside("mtp.{layer}", _mtp(sizes, kind.moe)))
    return tuple(_embedding(sizes) if kind.name == "embedding" else _output(sizes))


@cache
def final_norm(sizes: Sizes) -> tuple[Parameter, ...]:
    """The norm behind the decoder (`holds_final_norm` says which stage has it)."""
    return tuple(_norm(sizes, "norm", sizes.hidden))


@cache
def mtp_embedding(sizes: Sizes) -> Parameter:
    """The copy of the embedding on a stage with MTP modules: one for all of them."""
    (table,) = (row for row in _embedding(sizes) if row.name == EMBEDDING)
    return table._replace(name=MTP_EMBEDDING, copy_of=EMBEDDING)


def beside_layers(sizes: Sizes) -> tuple[Parameter, ...]:
    """The rows of all that is in no numbered layer, copies included."""
    return (*_embedding(sizes), *final_norm(sizes), mtp_embedding(sizes), *_output(sizes))


def _embedding(sizes: Sizes) -> Iterator[Parameter]:
    yield Parameter(EMBEDDING, (sizes.vocabulary, sizes.hidden), "embedding", (("tp", 0),))
    if sizes.positions:
        yield Parameter("position_embeddings.weight", (sizes.positions, sizes.hidden), "embedding", gradient="tokens")


def _output(sizes: Sizes) -> Iterator[Parameter]:
    shape, splits = (sizes.vocabulary, sizes.hidden), (("tp", 0),)
    if sizes.tied:
        yield Parameter(OUTPUT, shape, "embedding", splits, copy_of=EMBEDDING)
    else:
        yield Parameter(OUTPUT, shape, "matrix", splits)


def _decoder(sizes: Sizes, moe: bool) -> Iterator[Parameter]:
    yield from _inside("attention", _latent_attention(sizes) if sizes.latent else _grouped_attention(sizes))
    yield from _norm(sizes, "attention_norm", sizes.hidden, "layernorm")
    if moe:
        yield from _inside("moe", _mixture(sizes))
    else:
        yield from _inside("feed_forward", _feed_forward(sizes, sizes.ffn, "mlp"))
    yield from _norm(sizes, "ffn_norm", sizes.hidden, "layernorm")


def _mtp(sizes: Sizes, moe: bool) -> Iterator[Parameter]:
    yield from _norm(sizes, "enorm", sizes.hidden)
    yield from _norm(sizes, "hnorm", sizes.hidden)
    yield _whole("eh_proj", sizes.hidden, 2 * sizes.hidden)
    yield from _inside("layer", _decoder(sizes, moe))
    yield from _norm(sizes, "norm", sizes.hidden)


def _grouped_attention(sizes: Sizes) -> Iterator[Parameter]:
    h, queries, keys = sizes.hidden, sizes.heads * sizes.head, sizes.groups * sizes.head
    yield from _columns("wq", queries, h, bias=sizes.qkv_bias)
    for name in ("wk", "wv"):
        for row in _columns(name, keys, h, bias=sizes.qkv_bias):
            yield row._replace(units=sizes.groups)
    yield from _rows("wo", h, queries, bias=sizes.biases)
    if sizes.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield from _norm(sizes, name, sizes.head, gradient="heads")


def _latent_attention(sizes: Sizes) -> Iterator[Parameter]:
    """Down-projections are whole on every rank; what expands the compressed vectors again is split by heads."""
    h, again = sizes.hidden, "mla_up_proj"
    queries = sizes.heads * sizes.query_head
    if sizes.q_rank is None:
        yield from _columns("wq", queries, h)
    else:
        yield _whole("wq_a", sizes.q_rank, h)
        yield from _norm(sizes, "q_norm", sizes.q_rank, again)
        yield from _columns("wq_b", queries, sizes.q_rank, again)
    yield _whole("wkv_a", sizes.kv_rank + sizes.turned, h)
    yield from _norm(sizes, "kv_norm", sizes.kv_rank, again)
    yield from _columns("wkv_b", sizes.heads * (sizes.qk_head + sizes.v_head), sizes.kv_rank, again)
    yield from _rows("wo", h, sizes.heads * sizes.v_head)


def _feed_forward(sizes: Sizes, width: int, recomputed: str) -> Iterator[Parameter]:
    h, bias = sizes.hidden, sizes.biases
    yield from _columns("w1", width, h, recomputed, bias=bias)
    yield from _rows("w2", h, width, recomputed, bias=bias)
    if sizes.gated:
        yield from _columns("w3", width, h, recomputed, bias=bias)


def _mixture(sizes: Sizes) -> Iterator[Parameter]:
    weight = (sizes.experts, sizes.hidden)
    yield Parameter("router.weight", weight, "router", gradient="tokens", recomputed="moe")
    if sizes.router_bias:
        count = (sizes.experts,)
        yield Parameter("router.expert_bias", count, "correction", (), "none", "zeros", "moe")
    for row in _inside("experts.{expert}", _feed_forward(sizes, sizes.expert, "moe")):
        # What tp splits of a feed-forward, etp splits of an expert; the stack has one dim more.
        splits = (("ep", 0), *(("etp", dim + 1) for _, dim in row.splits))
        role: Role = "expert" if row.role == "matrix" else row.role
        yield row._replace(role=role, splits=splits, experts=sizes.experts)
    if sizes.shared:
        yield from _inside("shared_experts", _feed_forward(sizes, sizes.shared, "moe"))


# --- kinds of rows ---------------------------------------------------------------------------------------------------


def _columns(
    name: str, width: int, inputs: int, recomputed: str | None = None, *, bias: bool = False
) -> Iterator[Parameter]:
    """A product whose outputs are split: every rank reads all inputs and makes some outputs."""
    yield Parameter(f"{name}.weight", (width, inputs), "matrix", (("tp", 0),), recomputed=recomputed)
    if bias:
        yield Parameter(f"{name}.bias", (width,), "bias", (("tp", 0),), start="zeros", recomputed=recomputed)


def _rows(
    name: str, width: int, inputs: int, recomputed: str | None = None, *, bias: bool = False
) -> Iterator[Parameter]:
    """A product into the residual stream whose inputs are split; its bias is added once, to the sum over ranks."""
    weight = Parameter(f"{name}.weight", (width, inputs), "matrix", (("tp", 1),), recomputed=recomputed)
    yield weight._replace(start="residual")
    if bias:
        yield Parameter(f"{name}.bias", (width,), "bias", (), "tokens", "zeros", recomputed)


def _whole(name: str, width: int, inputs: int) -> Parameter:
    """A product that every rank makes for its own tokens."""
    return Parameter(f"{name}.weight", (width, inputs), "matrix", gradient="tokens")


def _norm(
    sizes: Sizes, name: str, width: int, recomputed: str | None = None, gradient: Gradient = "tokens"
) -> Iterator[Parameter]:
    """LayerNorm has a bias beside its weight."""
    yield Parameter(f"{name}.weight", (width,), "norm", (), gradient, "ones", recomputed)
    if sizes.norm_bias:
        yield Parameter(f"{name}.bias", (width,), "bias", (), gradient, "zeros", recomputed)


def _inside(prefix: str, rows: Iterable[Parameter]) -> Iterator[Parameter]:
    return (row._replace(name=f"{prefix}.{row.name}") for row in rows)
