"""Self-attention [b, s, h] -> [b, s, h] (b microbatch, s sequence, h hidden): with grouped queries, or multi-head
latent, where one compressed vector a token gives keys and values. Between the projections is `core_attention`.

Attribute names are canonical parameter names: renaming one renames a checkpoint key. Source of latent attention: the
DeepSeek-V2 report, arXiv:2405.04434, section 2.1, with the storage and scales of its published weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from ppctl.config.schema import ModelConfig
from ppctl.model.dropout import Draws, Dropout
from ppctl.model.dropped_attention import Dropped, attention_with_dropout
from ppctl.model.kernels import ON_CPU, AttendDocuments, Kernels
from ppctl.model.linear import Linear, Projection, columns, from_columns, makes_sums
from ppctl.model.norms import make_norm
from ppctl.model.packing import Documents
from ppctl.model.rotary import rotate, rotate_heads, yarn_magnitude
from ppctl.model.split import TensorSplit, enter
from ppctl.weight_gradients.products import spaced

Attend = Callable[[Tensor, Tensor, Tensor, Documents | None, float | None, Dropped | None], Tensor]
"""`attend` with its kernels, or what stands in its place if ranks share sequences (`parallel/context.py`)."""


class SelfAttention(nn.Module):
    """The heads of an attention layer; subclasses project a hidden state to queries, keys and values, and back."""

    scale: float | None = None

    def __init__(self, model: ModelConfig, kernels: Kernels) -> None:
        super().__init__()
        self.kernels, self.dropout = kernels, Dropout(model.attention_dropout)
        self.interleaved = model.rotary_interleaved
        self.split: TensorSplit | None = None
        self.shared: Attend | None = None

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, draws: Draws | None = None
    ) -> Tensor:
        """The heads' weighted values, side by side: what is recomputed as `core_attn`."""
        dropped, p = None, self.dropout.p
        if draws is not None and p:
            dropped = Dropped(self.dropout.keys(draws), p, 0 if self.split is None else self.split.rank * q.shape[1])
        return core_attention(q, k, v, self.kernels, documents, self.scale, dropped, self.shared)


def core_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernels: Kernels,
    documents: Documents | None = None,
    scale: float | None = None,
    dropped: Dropped | None = None,
    shared: Attend | None = None,
) -> Tensor:
    """Causal attention within each row, or within each document if `documents` is given.

    Returns [b, s, heads x values' width], the heads side by side.
    The arguments are those of `attend`. If ranks share sequences, `shared` attends, and q, k, v are this rank's parts.
    With `dropped` probabilities none of torch's kernels can be used.
    """
    way = partial(attend, kernels=kernels) if shared is None else shared
    return way(q, k, v, documents, scale, dropped).transpose(1, 2).flatten(2)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Documents | None,
    scale: float | None,
    dropped: Dropped | None = None,
    *,
    kernels: Kernels,
) -> Tensor:
    """Causal attention within whole rows, or their documents if `documents` is given: [b, heads, s, values' width].

    q [b, heads, s, width], k [b, groups, s, width], v [b, groups, s, values' width], where a group of neighbouring
    heads shares keys and values. `scale` of the scores is 1 / sqrt(width) by default.
    """
    if dropped is not None:
        mixed = attention_with_dropout(q, k, v, dropped, documents, scale)
        by_head: Tensor = mixed.unflatten(2, (q.shape[1], -1)).transpose(1, 2)
        return by_head
    if documents is not None and kernels.attend_documents is not None:
        return _documents_at_once(kernels.attend_documents, q, k, v, documents, scale)
    of_rows: Callable[..., Tensor]
    if (outside := kernels.outside.get("attention")) is not None:
        of_rows = partial(outside.function, scale=q.shape[-1] ** -0.5 if scale is None else scale)
        return of_rows(q, k, v) if documents is None else documents.each(of_rows, q, k, v, dim=2)
    of_rows = partial(F.scaled_dot_product_attention, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    with sdpa_kernel(list(kernels.attention), set_priority=True) if kernels.attention else nullcontext():
        return of_rows(q, k, v) if documents is None else documents.each(of_rows, q, k, v, dim=2)


def _documents_at_once(
    kernel: AttendDocuments, q: Tensor, k: Tensor, v: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    """`attend` by one call of the kernel for all documents, whose tokens lie one after another: [b x s, heads, width].

    The kernel needs one width: narrower values (of latent attention) are filled up with zeros, which add nothing.
    """
    width, rows = v.shape[-1], (q.shape[0], q.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    v = F.pad(v, (0, q.shape[-1] - width))
    q, k, v = (heads.transpose(1, 2).flatten(0, 1) for heads in (q, k, v))
    bounds, longest = documents.bounds, documents.longest
    assert bounds is not None  # whoever makes Documents calls `bounds_of` if this kernel was chosen
    grouped = q.shape[1] != k.shape[1]
    causal = (-1, 0)  # a window: all before a token, nothing after it
    mixed = kernel(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=causal, enable_gqa=grouped)
    by_head: Tensor = mixed[..., :width].unflatten(0, rows).transpose(1, 2)
    return by_head


class Attention(SelfAttention):
    """Causal self-attention [b, s, h] -> [b, s, h]; `num_attention_heads` queries share `num_query_groups` keys.

    With `qk_layernorm`, queries and keys are normalised per head before they are turned (as Qwen3 does). With
    `rotary_percent` below 1 only the first dimensions of a head are turned (as GLM-4.5 does).
    """

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__(model, kernels)
        dim = self.head_dim = model.head_dim
        queries = model.num_attention_heads * dim
        self.groups = model.query_groups
        keys = self.groups * dim
        biases = model.add_qkv_bias or model.add_bias_linear
        self.wq = Linear(model.hidden_size, queries, bias=biases, fp8=kernels.fp8)
        self.wk = Linear(model.hidden_size, keys, bias=biases, fp8=kernels.fp8)
        self.wv = Linear(model.hidden_size, keys, bias=biases, fp8=kernels.fp8)
        self.wo = Linear(queries, model.hidden_size, bias=model.add_bias_linear, fp8=kernels.fp8)
        self.q_norm = make_norm(model, dim) if model.qk_layernorm else nn.Identity()
        self.k_norm = make_norm(model, dim) if model.qk_layernorm else nn.Identity()

    def forward(
        self, x: Tensor, turns: Tensor | None, documents: Documents | None = None, draws: Draws | None = None
    ) -> Tensor:
        """Attend within each sequence of `x`, or each of its `documents`; `turns` are `Rotary.turns`, or None."""
        q, k, v = (self._heads(each) for each in columns(x, self.wq, *self._keys_values(), split=self.split))
        # Norm before transposing: a norm returns a contiguous tensor, which loses a transposed layout.
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q = rotate(q, turns, interleaved=self.interleaved)
        k = rotate(k, turns, interleaved=self.interleaved)
        return from_columns(self.mix(q, k, v, documents, draws), self.wo, self.split)

    def _keys_values(self) -> tuple[Linear | Projection, Linear | Projection]:
        """The projections to this rank's keys and values; with more ranks than groups, ranks have the same group."""
        if self.split is None or self.groups % self.split.size == 0:
            return self.wk, self.wv
        first = self.groups * self.split.rank // self.split.size * self.head_dim
        own = slice(first, first + self.head_dim)
        return self.wk.outputs(own), self.wv.outputs(own)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)  # side by side


LATENT_NORM_EPSILON = 1e-6
"""The epsilon of the compressed vectors' norms, whatever the model's own epsilon is: the family was trained so."""


class LatentAttention(SelfAttention):
    """Causal self-attention whose heads are expanded from a compressed query (optional) and a compressed key/value.

    A head has `qk_head_dim` dimensions without positions and `qk_pos_emb_head_dim` with positions; all heads share one
    key part with positions. Values have `v_head_dim` dimensions.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__(model, kernels)
        h, heads = model.hidden_size, model.num_attention_heads
        self.q_widths = [model.qk_head_dim, model.qk_pos_emb_head_dim]
        self.latent_widths = [model.kv_lora_rank, model.qk_pos_emb_head_dim]
        self.kv_widths = [model.qk_head_dim, model.v_head_dim]
        queries = heads * sum(self.q_widths)
        if model.q_lora_rank is None:
            self.wq = Linear(h, queries, fp8=kernels.fp8)
        else:
            self.wq_a = Linear(h, model.q_lora_rank, fp8=kernels.fp8)
            self.q_norm = make_norm(model, model.q_lora_rank, LATENT_NORM_EPSILON)
            self.wq_b = Linear(model.q_lora_rank, queries, fp8=kernels.fp8)
        self.wkv_a = Linear(h, sum(self.latent_widths), fp8=kernels.fp8)
        self.kv_norm = make_norm(model, model.kv_lora_rank, LATENT_NORM_EPSILON)
        self.wkv_b = Linear(model.kv_lora_rank, heads * sum(self.kv_widths), fp8=kernels.fp8)
        self.wo = Linear(heads * model.v_head_dim, h, fp8=kernels.fp8)
        self.compresses_queries = model.q_lora_rank is not None
        self.scale = yarn_magnitude(model, model.mscale_all_dim) ** 2 / sum(self.q_widths) ** 0.5

    def forward(
        self, x: Tensor, turns: Tensor, documents: Documents | None = None, draws: Draws | None = None
    ) -> Tensor:
        """Attend within each sequence of `x`, or each of its `documents`; `turns` as `Rotary.turns` gives them."""
        if self.compresses_queries:
            compressed, keys_values = columns(x, self.wq_a, self.wkv_a)
        elif self.split is None:
            compressed, keys_values = columns(x, self.wq, self.wkv_a)
        else:
            (compressed,), keys_values = columns(x, self.wq, split=self.split), self.wkv_a(x)
        q, k, v = self.expand(compressed, keys_values, turns)
        return from_columns(self.mix(q, k, v, documents, draws), self.wo, self.split)

    def expand(self, queries: Tensor, keys_values: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The heads' queries and keys, turned, and values, from what was compressed: recomputed as `mla_up_proj`."""
        if self.compresses_queries:
            (queries,) = columns(self.q_norm(queries), self.wq_b, split=self.split)
        latent, shared = torch.split(keys_values, self.latent_widths, dim=-1)
        latent = self.kv_norm(latent)
        turned = rotate(enter(shared, self.split)[:, None], turns, interleaved=self.interleaved)
        first, heads = self.q_widths[0], queries.shape[-1] // sum(self.q_widths)
        own = self.compresses_queries  # else they are an input, which recomputation holds
        q = rotate_heads(queries, heads, turns, first=first, interleaved=self.interleaved, own=own)
        if self.split is None and makes_sums(self.wkv_b):
            return q, *spaced(latent, self.wkv_b.weight, turned, self.kv_widths)
        (expanded,) = columns(latent, self.wkv_b, split=self.split)
        plain, values = expanded.unflatten(-1, (heads, -1)).split(self.kv_widths, dim=-1)
        k = torch.cat((plain.transpose(1, 2), turned.expand(-1, heads, -1, -1)), dim=-1)
        # Attention keeps values: a view of them would keep the plain keys, too.
        return q, k, values.transpose(1, 2).clone(memory_format=torch.contiguous_format)
