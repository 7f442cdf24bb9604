"""The table of the parameters of ppctl's own decoder, from which counts, shapes, names and rules are read.

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
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.foreign_model import described
from ppctl.geometry.layers import Kind
from ppctl.geometry.rows import EMBEDDING, MTP_EMBEDDING, OUTPUT, Gradient, Parameter, Role


class Sizes(NamedTuple):
    """The part of a ModelConfig on which parameters depend: hashable, so that rows are made once."""

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
    """The number of learned positions; 0 if positions are not learned."""
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
    transformers: str | None
    """The text that describes a transformers model and has the model's rows."""

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
            groups=model.query_groups,
            head=model.head_dim,
            ffn=model.ffn_hidden_size,
            expert=model.expert_width,
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
            transformers=model.transformers,
        )


# --- the table -------------------------------------------------------------------------------------------------------


@cache
def kind_parameters(sizes: Sizes, kind: Kind) -> tuple[Parameter, ...]:
    """The rows of one layer, in canonical order; for a loss those of the output, without the final norm. A transformers
    model's rows come from its description, in which the final norm is the loss layer's."""
    if sizes.transformers is not None:
        return described(sizes.transformers).rows(kind.name, kind.structure)
    if kind.name == "decoder":
        return tuple(_inside("layers.{layer}", _decoder(sizes, kind.moe)))
    if kind.name == "mtp":
        return tuple(_inside("mtp.{layer}", _mtp(sizes, kind.moe)))
    return tuple(_embedding(sizes) if kind.name == "embedding" else _output(sizes))


@cache
def final_norm(sizes: Sizes) -> tuple[Parameter, ...]:
    """The norm after the decoder (`holds_final_norm` says which stage has it)."""
    return () if sizes.transformers is not None else tuple(_norm(sizes, "norm", sizes.hidden))


@cache
def mtp_embedding(sizes: Sizes) -> Parameter:
    """The copy of the embedding on a stage with MTP modules, which share it."""
    (table,) = (row for row in _embedding(sizes) if row.name == EMBEDDING)
    return table._replace(name=MTP_EMBEDDING, copy_of=EMBEDDING)


def beside_layers(sizes: Sizes) -> tuple[Parameter, ...]:
    """The rows of parameters outside numbered layers, copies included."""
    if sizes.transformers is not None:
        foreign = described(sizes.transformers)
        return (*foreign.first, *foreign.last)
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
    """The rows of latent attention: down-projections are whole on every rank, up-projections split by heads."""
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
        # etp splits an expert as tp splits a feed-forward; the stack has one dim more.
        splits = (("ep", 0), *(("etp", dim + 1) for _, dim in row.splits))
        role: Role = "expert" if row.role == "matrix" else row.role
        yield row._replace(role=role, splits=splits, experts=sizes.experts)
    if sizes.shared:
        yield from _inside("shared_experts", _feed_forward(sizes, sizes.shared, "moe"))


# --- kinds of rows ---------------------------------------------------------------------------------------------------


def _columns(
    name: str, width: int, inputs: int, recomputed: str | None = None, *, bias: bool = False
) -> Iterator[Parameter]:
    """The rows of a product whose outputs are split: every rank reads all inputs and makes some outputs."""
    yield Parameter(f"{name}.weight", (width, inputs), "matrix", (("tp", 0),), recomputed=recomputed)
    if bias:
        yield Parameter(f"{name}.bias", (width,), "bias", (("tp", 0),), start="zeros", recomputed=recomputed)


def _rows(
    name: str, width: int, inputs: int, recomputed: str | None = None, *, bias: bool = False
) -> Iterator[Parameter]:
    """The rows of a product into the residual stream whose inputs are split; its bias is added once, to the sum over
    ranks."""
    weight = Parameter(f"{name}.weight", (width, inputs), "matrix", (("tp", 1),), recomputed=recomputed)
    yield weight._replace(start="residual")
    if bias:
        yield Parameter(f"{name}.bias", (width,), "bias", (), "tokens", "zeros", recomputed)


def _whole(name: str, width: int, inputs: int) -> Parameter:
    """The row of a product that every rank computes for its own tokens."""
    return Parameter(f"{name}.weight", (width, inputs), "matrix", gradient="tokens")


def _norm(
    sizes: Sizes, name: str, width: int, recomputed: str | None = None, gradient: Gradient = "tokens"
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), "norm", (), gradient, "ones", recomputed)
    if sizes.norm_bias:
        yield Parameter(f"{name}.bias", (width,), "bias", (), gradient, "zeros", recomputed)


def _inside(prefix: str, rows: Iterable[Parameter]) -> Iterator[Parameter]:
    return (row._replace(name=f"{prefix}.{row.name}") for row in rows)
