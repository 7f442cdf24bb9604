"""Attention of some queries to one block of keys: the partial result with its log-sum-exp, and the backward.

Results over several blocks of keys are merged by their log-sum-exps (`parallel/context.py`); a block's backward then
takes the *merged* result and log-sum-exp, from which the block's own probabilities follow (decision 42).

A kernel's functions take a `Block`:
    q [b, heads, s, width], k [b, groups, t, width], v [b, groups, t, values' width]: any strides, but each vector is
        contiguous; a group of neighbouring heads shares keys and values
    scale: of the scores; causal: whether a query sees only the keys up to its own place (then s = t)
    documents: for a kernel that joins them, their lengths in each row
and return these two; a backward takes them:
    out [b, heads, s, values' width]
    log_sum [b, heads, s]: the log-sum-exp of the scores, in float32 or wider
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ppctl.model.packing import bounds_of
from ppctl.sequence_halves import Lengths
from ppctl.tensors.wide_dtype import wide_dtype

_aten = torch.ops.aten

MULTIPLE = 8
"""16 bytes of 16-bit numbers: flash attention needs heads, and grouped_mm rows, whose width is a multiple of this."""


Block = tuple[Tensor, Tensor, Tensor, float, bool, Lengths | None]
"""(q, k, v, scale, causal, documents)."""


class BlockAttention(NamedTuple):
    """A kernel for attention to one block of keys, as a forward and a backward."""

    name: str
    forward: Callable[[Block], tuple[Tensor, Tensor]]
    """Returns out and log-sums."""
    backward: Callable[[Tensor, Block, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(out's gradient, block, out, log-sums) -> gradients of q, k and v."""
    joins_documents: bool = False
    """Whether one call can take a causal block of several documents, by their lengths, and attend within each."""


def _unfused(block: Block) -> tuple[Tensor, Tensor]:
    """Products and a softmax, in float32 or wider: any device, dtype and widths. Holds scores [b, heads, s, t]."""
    q, k, v, scale, causal, _ = block
    scores, values = _scores(q, k, scale, causal), _wide(v)
    log_sum = scores.logsumexp(-1)
    out = (scores - log_sum[..., None]).exp_() @ values[:, :, None]
    return out.flatten(1, 2).to(q.dtype), log_sum.flatten(1, 2)


def _unfused_backward(gradient: Tensor, block: Block, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `_unfused`. Formulas: Dao et al., arXiv 2205.14135, appendix B.2."""
    q, k, v, scale, causal, _ = block
    groups = k.shape[1]
    of_out, result, queries = (_wide(heads).unflatten(1, (groups, -1)) for heads in (gradient, out, q))
    keys, values = _wide(k)[:, :, None], _wide(v)[:, :, None]
    shares = (_scores(q, k, scale, causal) - log_sum.unflatten(1, (groups, -1))[..., None]).exp_()
    of_values = (shares.transpose(-1, -2) @ of_out).sum(2)
    by_score = (of_out @ values.transpose(-1, -2) - (of_out * result).sum(-1, keepdim=True)).mul_(shares).mul_(scale)
    of_queries, of_keys = by_score @ keys, (by_score.transpose(-1, -2) @ queries).sum(2)
    return of_queries.flatten(1, 2).to(q.dtype), of_keys.to(k.dtype), of_values.to(v.dtype)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """The scaled scores [b, groups, heads of a group, s, t], in float32 or wider; -inf for keys hidden by `causal`."""
    scores: Tensor = (_wide(q).unflatten(1, (k.shape[1], -1)) @ _wide(k)[:, :, None].transpose(-1, -2)).mul_(scale)
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, -torch.inf)
    return scores


def _wide(heads: Tensor) -> Tensor:
    return heads.to(wide_dtype(heads.dtype))


def _flash_on_cpu(block: Block) -> tuple[Tensor, Tensor]:
    q, k, v, scale, causal, _ = block
    width = max(q.shape[-1], v.shape[-1])
    filled = (_filled(heads, width) for heads in (q, k, v))
    out, log_sum = _aten._scaled_dot_product_flash_attention_for_cpu(*filled, 0.0, causal, scale=scale)
    return out[..., : v.shape[-1]], log_sum


def _flash_on_cpu_backward(
    gradient: Tensor, block: Block, out: Tensor, log_sum: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, scale, causal, _ = block
    width = max(q.shape[-1], v.shape[-1])
    filled = (_filled(heads, width) for heads in (gradient, q, k, v, out))
    gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(*filled, log_sum, 0.0, causal, scale=scale)
    of_q, of_k, of_v = (each[..., : heads.shape[-1]] for each, heads in zip(gradients, (q, k, v), strict=True))
    return of_q, of_k, of_v


def _flash(block: Block) -> tuple[Tensor, Tensor]:
    """CUDA's flash attention 2, on the current stream; the host does not wait. 16-bit numbers, heads up to 256 wide.

    The kernel's tensors are [b, s, heads, width]; with `documents` they are [b x s, heads, width], and log-sums are
    [heads, b x s]. Never run: written after torch 2.13's `torch/nn/attention/varlen.py` and ATen's signatures.
    """
    q, k, v, scale, causal, documents = block
    tokens = [_tokens(heads, _flash_width(q, v), documents) for heads in (q, k, v)]
    bounds = _bounds(documents, q, k)
    out, log_sum, *_ = _aten._flash_attention_forward(*tokens, *bounds, 0.0, causal, False, scale=scale)
    if documents is not None:
        out, log_sum = (
            out.unflatten(0, (len(documents), -1)),
            log_sum.unflatten(1, (len(documents), -1)).transpose(0, 1),
        )
    return out.transpose(1, 2)[..., : v.shape[-1]], log_sum


def _flash_backward(gradient: Tensor, block: Block, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Backward of `_flash`. Never run. The kernel needs contiguous log-sums; the two empty tensors are dropout's."""
    q, k, v, scale, causal, documents = block
    tokens = [_tokens(heads, _flash_width(q, v), documents) for heads in (gradient, q, k, v, out)]
    log_sum = (log_sum if documents is None else log_sum.transpose(0, 1).flatten(1)).contiguous()
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    bounds = _bounds(documents, q, k)
    gradients = _aten._flash_attention_backward(*tokens, log_sum, *bounds, 0.0, causal, state, unused, scale=scale)
    if documents is not None:
        gradients = [each.unflatten(0, (len(documents), -1)) for each in gradients]
    of_q, of_k, of_v = (
        each.transpose(1, 2)[..., : heads.shape[-1]] for each, heads in zip(gradients, (q, k, v), strict=True)
    )
    return of_q, of_k, of_v


def _flash_width(q: Tensor, v: Tensor) -> int:
    return -(-max(q.shape[-1], v.shape[-1]) // MULTIPLE) * MULTIPLE


def _tokens(heads: Tensor, width: int, documents: Lengths | None) -> Tensor:
    """Heads in flash attention's layout: [b, s, heads, width], or with `documents` [b x s, heads, width]."""
    tokens = _filled(heads, width).transpose(1, 2)
    return tokens if documents is None else tokens.flatten(0, 1)


def _filled(heads: Tensor, width: int) -> Tensor:
    """Heads whose vectors are filled up to `width` with zeros, which change no score and no column of a result."""
    return F.pad(heads, (0, width - heads.shape[-1])) if heads.shape[-1] < width else heads


def _bounds(documents: Lengths | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Start of each document among queries and keys, and the length of the longest."""
    if documents is None:
        return None, None, q.shape[2], k.shape[2]
    bounds, longest = _bounds_on(q.device, documents), max(max(row) for row in documents)
    return bounds, bounds, longest, longest


@lru_cache(8)
def _bounds_on(device: torch.device, documents: Lengths) -> Tensor:
    """`bounds_of` the documents, cached: all layers of a microbatch, and its backward, need the same bounds."""
    return bounds_of([documents], device)[0]


UNFUSED = BlockAttention("unfused", _unfused, _unfused_backward)
FLASH_ON_CPU = BlockAttention("flash", _flash_on_cpu, _flash_on_cpu_backward)
FLASH_ON_CUDA = BlockAttention("flash", _flash, _flash_backward, joins_documents=True)
