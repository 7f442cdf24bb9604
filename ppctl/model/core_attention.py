"""The middle of attention, between the projections: from queries, keys and values of heads to weighted values."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from ppctl.config.schema import ModelConfig
from ppctl.model.dropout import Draws, Dropout
from ppctl.model.dropped_attention import Dropped, attention_with_dropout
from ppctl.model.kernels import AttendDocuments, Kernels
from ppctl.model.packing import Documents
from ppctl.model.split import TensorSplit

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
    """Causal attention within each row, or document: [b, s, heads x values' width], the heads side by side.

    q, k, v, `documents` and `scale` as in `attend`, or, of a rank's part of the rows, as in `shared`.
    With `dropped` probabilities no kernel of torch's can be taken.
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
    """Causal attention within each row, or document, of whole rows: [b, heads, s, values' width].

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
    assert bounds is not None  # `bounds_of`: whoever makes Documents makes them if this kernel was chosen
    grouped = q.shape[1] != k.shape[1]
    causal = (-1, 0)  # a window: all before a token, nothing after it
    mixed = kernel(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=causal, enable_gqa=grouped)
    by_head: Tensor = mixed[..., :width].unflatten(0, rows).transpose(1, 2)
    return by_head
