"""Attention with dropout, in blocks of queries: no fused kernel of torch's draws by position (decision 40).

Only queries, keys and values are saved for the backward, which computes a block's probabilities and draws again. The
scores of `score_rows` queries of each head are in memory at once.

If ranks share sequences, `Dropped` draws for the blocks of `parallel/context.py`, by the global positions of their
queries and keys. Their results merge as those of other kernels: log-sums are over all scores, also of dropped keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ppctl.geometry.layers import score_rows
from ppctl.model.block_attention import Block
from ppctl.model.dropout import kept, row_keys
from ppctl.model.linear import without_autocast
from ppctl.model.packing import Documents
from ppctl.tensors.wide_dtype import wide_dtype


class Dropped(NamedTuple):
    """Which probabilities of attention are dropped: each with probability `p`, by (sample's key, head, query, key)."""

    keys: Tensor
    """[b] int64: each sample's key for this attention."""
    p: float
    first_head: int = 0
    """The global number of the first head that is drawn for."""

    def of_heads(self, rank: int, heads: int) -> Dropped:
        """The draws for a rank's `heads` heads, which come after those of the ranks before it."""
        return self._replace(first_head=self.first_head + rank * heads)

    def at(self, rows: slice, queries: Tensor, keys: Tensor) -> DroppedBlock:
        """The kernel for a block of the samples `rows`, whose queries and keys have these positions (int64)."""
        return DroppedBlock(self._replace(keys=self.keys[rows]), queries, keys)


def kept_probabilities(dropped: Dropped, heads: int, queries: Tensor, seen: Tensor) -> Tensor:
    """Which probabilities stay, bool [b, heads, q, k], at the global positions `queries` [q] and `seen` [k] (int64)."""
    numbers = torch.arange(dropped.first_head, dropped.first_head + heads, device=queries.device)[:, None] << 32
    return kept(row_keys(dropped.keys[:, None, None], numbers | queries), seen.to(torch.int32), dropped.p)


def attention_with_dropout(
    q: Tensor, k: Tensor, v: Tensor, dropped: Dropped, documents: Documents | None = None, scale: float | None = None
) -> Tensor:
    """`core_attention` with dropped probabilities: [b, s, heads x values' width]."""
    kind = q.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        q, k, v = (heads.to(torch.get_autocast_dtype(kind)) for heads in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if documents is None:
        return _attend(q, k, v, dropped, scale, 0)
    rows = []
    for row, lengths in enumerate(documents.lengths):
        first, parts, of_row = 0, [], dropped._replace(keys=dropped.keys[row : row + 1])
        documents_of = (each[row : row + 1].split(lengths, dim=2) for each in (q, k, v))
        for own_q, own_k, own_v in zip(*documents_of, strict=True):
            parts.append(_attend(own_q, own_k, own_v, of_row, scale, first))
            first += own_q.shape[2]
        rows.append(torch.cat(parts, dim=1))
    return torch.cat(rows)


def _attend(q: Tensor, k: Tensor, v: Tensor, dropped: Dropped, scale: float, first: int) -> Tensor:
    """Attention of one document, or of rows of equal length, whose first tokens have the position `first`."""
    out: Tensor = _DroppedAttention.apply(q, k, v, dropped, scale, first)  # type: ignore[no-untyped-call]  # torch's own
    return out


class DroppedBlock(NamedTuple):
    """A kernel like `BlockAttention`, with dropped probabilities, for queries and keys at these positions."""

    dropped: Dropped
    queries: Tensor
    keys: Tensor
    joins_documents: bool = False

    def forward(self, block: Block) -> tuple[Tensor, Tensor]:
        """The result, and the log-sums of all scores."""
        q, k, v, scale, causal, _ = block
        b, heads, s, _ = q.shape
        out, log_sums = v.new_empty(b, heads, s, v.shape[-1]), q.new_empty(b, heads, s, dtype=wide_dtype(q.dtype))
        for rows in _runs(q, k):
            scores = self.scores(q, k, rows, scale, causal=causal)
            log_sums[:, :, rows] = _by_head(scores, heads).logsumexp(-1)
            _by_head(scores, heads).sub_(log_sums[:, :, rows, None]).exp_()
            weights = scores.mul_(self.kept(rows, heads, k.shape[1])).mul_(1 / (1 - self.dropped.p)).to(v.dtype)
            out[:, :, rows] = _by_head(weights @ v, heads)
        return out, log_sums

    def backward(self, gradient: Tensor, block: Block, out: Tensor, log_sum: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, from the merged result and log-sums: sums over all keys are gradient x result."""
        q, k, v, scale, causal, _ = block
        heads, groups, wide = q.shape[1], k.shape[1], wide_dtype(q.dtype)
        of_q = torch.empty_like(q)
        of_k, of_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        sums = (gradient.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        for rows in _runs(q, k):
            shares = self.scores(q, k, rows, scale, causal=causal)
            _by_head(shares, heads).sub_(log_sum[:, :, rows, None]).exp_()
            drop = self.kept(rows, heads, groups).to(wide).mul_(1 / (1 - self.dropped.p))
            of_rows = _by_group(gradient[:, :, rows], groups)
            of_v += (shares * drop).to(v.dtype).transpose(2, 3) @ of_rows
            of_scores = (of_rows @ v.transpose(2, 3)).to(wide).mul_(drop)
            _by_head(of_scores, heads).sub_(sums[:, :, rows])
            of_scores = of_scores.mul_(shares).mul_(scale).to(q.dtype)
            of_q[:, :, rows] = _by_head(of_scores @ k, heads)
            of_k += of_scores.transpose(2, 3) @ _by_group(q[:, :, rows], groups)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype)

    def scores(self, q: Tensor, k: Tensor, rows: slice, scale: float, *, causal: bool) -> Tensor:
        """The scores of the queries `rows`, at least float32: [b, groups, heads of a group x rows, keys]."""
        scores = (_by_group(q[:, :, rows], k.shape[1]) @ k.transpose(2, 3)).to(wide_dtype(q.dtype)).mul_(scale)
        if causal:
            _by_head(scores, q.shape[1]).masked_fill_(self.keys > self.queries[rows, None], -torch.inf)
        return scores

    def kept(self, rows: slice, heads: int, groups: int) -> Tensor:
        """Which of `scores` stay, bool in their shape."""
        return _by_group(kept_probabilities(self.dropped, heads, self.queries[rows], self.keys), groups)


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, dropped: Dropped, scale: float, first: int) -> Tensor:
        ctx.save_for_backward(q, k, v, dropped.keys)
        ctx.call = dropped[1:], scale, first
        b, heads, s, _ = q.shape
        out = v.new_empty(b, s, heads, v.shape[-1])
        with without_autocast(q.device.type):
            for queries, seen, shares, keep in _blocks(q, k, dropped, scale, first):
                weights = shares.mul_(keep).mul_(1 / (1 - dropped.p)).to(v.dtype)
                out[:, queries] = _by_head(weights @ v[:, :, seen], heads).transpose(1, 2)
        return out.flatten(2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, keys = ctx.saved_tensors
        heads, groups, (draws, scale, first) = q.shape[1], k.shape[1], ctx.call
        dropped = Dropped(keys, *draws)
        gradient = gradients[0].unflatten(2, (heads, -1)).transpose(1, 2)
        of_q = torch.empty_like(q)
        wide = wide_dtype(q.dtype)
        of_k, of_v = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        with without_autocast(q.device.type):
            for queries, seen, shares, keep in _blocks(q, k, dropped, scale, first):
                of_rows = _by_group(gradient[:, :, queries], groups)
                drop = keep.to(wide).mul_(1 / (1 - dropped.p))
                of_v[:, :, seen] += (shares * drop).to(v.dtype).transpose(2, 3) @ of_rows
                of_scores = (of_rows @ v[:, :, seen].transpose(2, 3)).to(wide).mul_(drop).mul_(shares)
                of_scores.addcmul_(shares, of_scores.sum(-1, keepdim=True), value=-1)
                of_scores = of_scores.mul_(scale).to(q.dtype)
                of_q[:, :, queries] = _by_head(of_scores @ k[:, :, seen], heads)
                of_k[:, :, seen] += of_scores.transpose(2, 3) @ _by_group(q[:, :, queries], groups)
        return of_q, of_k.to(k.dtype), of_v.to(v.dtype), None, None, None


def _blocks(
    q: Tensor, k: Tensor, dropped: Dropped, scale: float, first: int
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """For neighbouring queries: these, the keys up to the last of them, their probabilities (at least float32), and
    which of these stay, both [b, groups, heads of a group x queries, keys]."""
    positions = torch.arange(first, first + q.shape[2], device=q.device)
    for queries in _runs(q, k):
        seen = slice(0, queries.stop)
        block = DroppedBlock(dropped, positions, positions[seen])
        keep = block.kept(queries, q.shape[1], k.shape[1])  # draws need much memory: before there are scores
        shares = block.scores(q, k[:, :, seen], queries, scale, causal=True).softmax(-1)
        yield queries, seen, shares, keep


def _runs(q: Tensor, k: Tensor) -> Iterator[slice]:
    """Neighbouring queries whose scores are in memory at once."""
    step = score_rows(q.shape[0] * q.shape[1], k.shape[2])
    return (slice(first, min(first + step, q.shape[2])) for first in range(0, q.shape[2], step))


def _by_group(heads: Tensor, groups: int) -> Tensor:
    """[b, heads, n, width] -> [b, groups, heads of a group x n, width]."""
    by_group: Tensor = heads.unflatten(1, (groups, -1)).flatten(2, 3)
    return by_group


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """The reverse of `_by_group`, as a view."""
    return rows.view(rows.shape[0], heads, -1, rows.shape[-1])
