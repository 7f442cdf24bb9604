"""Cross entropy of next-token prediction, summed so that no cut of the batch changes what a token weighs.

Logits are a last stage's largest tensors: there are never more than LOSS_ROWS rows of them in float32 (float64 in a
model of float64) at a time (decision 33).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppctl.geometry.layers import LOSS_ROWS
from ppctl.model.mtp import ahead
from ppctl.model.packing import Documents
from ppctl.model.split import TensorSplit
from ppctl.tensors.wide_dtype import wide_dtype

NO_TOKEN = -100
"""The label of a token that does not count: torch's losses ignore it."""


def token_losses(logits: Tensor, labels: Tensor, *, overwrite: bool = False, words: Words | None = None) -> Tensor:
    """Cross entropy in nats, [b, s] and at least float32, of logits [b, s, vocab_size] and labels [b, s] (int64).

    With `words` logits are [b, s, own words], of a rank's part of the vocabulary; every rank gets all tokens' losses.

    Without, loss and gradient have the bits of `F.cross_entropy(logits.float(), ...)`; logits and labels are saved for
    the backward. With `overwrite` the caller must not read the logits again: the backward writes their gradient into
    their memory, unless autograd keeps them for somebody else, and a second backward raises RuntimeError.
    """
    if words is not None:
        of_words: Tensor = _LossesOfWords.apply(logits, labels, overwrite, words)  # type: ignore[no-untyped-call]  # torch's own
        return of_words
    losses: Tensor = _TokenLosses.apply(logits, labels, overwrite)  # type: ignore[no-untyped-call]  # torch's own
    return losses


def microbatch_loss(
    logits: Tensor,
    labels: Tensor,
    mask: Tensor,
    total_tokens: float | Tensor,
    *,
    overwrite: bool = False,
    words: Words | None = None,
) -> Tensor:
    """One microbatch's share of the batch's loss: the sum over its unmasked tokens / `total_tokens`.

    `mask` [b, s] is 1 if a token counts; `total_tokens` is the number of unmasked tokens of the whole global batch,
    so that the shares of all microbatches and data-parallel ranks add up to the mean over the batch's tokens.
    `overwrite` and `words` as in `token_losses`.
    """
    return (token_losses(logits, labels, overwrite=overwrite, words=words) * mask).sum() / total_tokens


class Words(NamedTuple):
    """A rank's own part of a split vocabulary, and the exchange with the ranks that have the other parts."""

    held: range
    split: TensorSplit


class _TokenLosses(torch.autograd.Function):
    """Softmax and loss treat each row by itself: taking the rows block by block changes no bit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, overwrite: bool) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.overwrite, ctx.overwritten = overwrite, False
        wide = _wide_blocks(logits, 2)
        losses = [
            F.nll_loss(_log_softmax(rows, *wide), wanted, reduction="none")
            for rows, wanted in _blocks(logits.flatten(0, 1), labels.flatten())
        ]
        return torch.cat(losses).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        of_logits = _memory_for_gradient(ctx)
        logits, labels = ctx.saved_tensors
        first, second, third = _wide_blocks(logits, 3)
        each = (logits.flatten(0, 1), labels.flatten(), gradients.flatten(), of_logits.flatten(0, 1))
        for rows, wanted, gradient, into in _blocks(*each):
            logs = _log_softmax(rows, first, second)
            of_logs = _nll_backward(gradient, logs, wanted, first)
            into.copy_(_log_softmax_backward(of_logs, logs, third))
        return of_logits, None, None


class _LossesOfWords(torch.autograd.Function):
    """Losses from the logits of a rank's part of the vocabulary: ranks exchange three numbers a token, and no logits.

    They are the largest logit, the sum of exponentials and the label's logit. The vocabulary is not padded: no rank
    holds what is not in it. Source: Shoeybi et al., arXiv:1909.08053, section 3.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, overwrite: bool, words: Words) -> Tensor:
        rows, wanted = logits.flatten(0, 1), labels.flatten()
        (wide,) = _wide_blocks(logits, 1)
        largest = words.split.largest(torch.cat([part.amax(-1) for part in rows.split(LOSS_ROWS)]).to(wide.dtype))
        own = wanted - words.held.start
        mine = (own >= 0) & (own < len(words.held))
        own = own.masked_fill(~mine, 0)
        sums = torch.stack((torch.empty_like(largest), rows.gather(-1, own[:, None])[:, 0].to(largest.dtype)))
        sums[1].masked_fill_(~mine, 0.0)
        for part, most, into in _blocks(rows, largest, sums[0]):
            exponents = wide[: len(part)].copy_(part).sub_(most[:, None]).exp_()
            torch.sum(exponents, -1, out=into)
        # A label's logit comes from the rank that holds the label.
        sums = words.split.add_up(sums)
        scale = largest + sums[0].log()
        losses = scale - sums[1]
        ctx.save_for_backward(logits, scale, own, mine)
        ctx.overwrite, ctx.overwritten = overwrite, False
        counted = wanted != NO_TOKEN
        ctx.counted = counted
        return losses.masked_fill_(~counted, 0.0).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None, None]:
        of_logits = _memory_for_gradient(ctx)
        logits, scale, own, mine = ctx.saved_tensors
        gradient = gradients.flatten().masked_fill(~ctx.counted, 0.0)
        (wide,) = _wide_blocks(logits, 1)
        each = (logits.flatten(0, 1), scale, own, mine, gradient, of_logits.flatten(0, 1))
        for rows, log_sum, word, here, factor, into in _blocks(*each):
            of_rows = wide[: len(rows)].copy_(rows).sub_(log_sum[:, None]).exp_()
            of_rows.scatter_add_(-1, word[:, None], -here[:, None].to(of_rows.dtype))
            into.copy_(of_rows.mul_(factor[:, None]))
        return of_logits, None, None, None


def _memory_for_gradient(ctx: Any) -> Tensor:
    """Memory for the gradient of the logits, the first saved tensor. Raises RuntimeError if they are overwritten.

    It is the logits' own memory if that is wanted and nobody else needs it. What was overwritten is not even read:
    autograd would refuse it in a message that does not name the loss.
    """
    if ctx.overwritten:
        raise RuntimeError("the logits of this loss were overwritten by their gradient in its first backward")
    logits: Tensor = ctx.saved_tensors[0]
    ctx.overwritten = ctx.overwrite and logits.is_contiguous() and not _shared(logits)
    if ctx.overwritten:
        return logits.detach()
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(LOSS_ROWS) for tensor in tensors), strict=True)


def _wide_blocks(logits: Tensor, count: int) -> tuple[Tensor, ...]:
    """Wide memory for `count` blocks, which all blocks share in turn: the system clears memory that is taken anew."""
    tokens, vocabulary = logits.shape[0] * logits.shape[1], logits.shape[2]
    wide = torch.empty(count, min(LOSS_ROWS, tokens), vocabulary, dtype=wide_dtype(logits.dtype), device=logits.device)
    return wide.unbind()


def _log_softmax(rows: Tensor, wide: Tensor, out: Tensor) -> Tensor:
    """The log-softmax of `rows`, in the memory of `out`; `wide` is scratch memory."""
    logs: Tensor = torch.ops.aten._log_softmax.out(wide[: len(rows)].copy_(rows), -1, False, out=out[: len(rows)])
    return logs


def _nll_backward(gradient: Tensor, logs: Tensor, labels: Tensor, out: Tensor) -> Tensor:
    """Autograd's own backward of `F.nll_loss(logs, labels, reduction="none")`, in the memory of `out`."""
    no_weights, no_reduction, unread = None, 0, gradient.new_empty(())
    of_logs: Tensor = torch.ops.aten.nll_loss_backward.grad_input(
        gradient, logs, labels, no_weights, no_reduction, NO_TOKEN, unread, grad_input=out[: len(logs)]
    )
    return of_logs


def _log_softmax_backward(gradient: Tensor, logs: Tensor, out: Tensor) -> Tensor:
    """Autograd's own backward of a log-softmax with the result `logs`, in the memory of `out`."""
    backward = torch.ops.aten._log_softmax_backward_data.out
    of_rows: Tensor = backward(gradient, logs, -1, logs.dtype, out=out[: len(logs)])
    return of_rows


def _shared(tensor: Tensor) -> bool:
    """Whether other tensors share this one's memory, such as an output that its operation saved.

    torch has no public count of them. If this count were wrong, autograd would refuse the backward that needs the old
    values, because the tensor's version has changed.
    """
    return _holders(tensor) > _holders(torch.empty(0, device="cpu"))


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def without(labels: Tensor, mask: Tensor) -> Tensor:
    """The labels [b, s], with NO_TOKEN where `mask` is 0: tokens that do not count."""
    return labels.masked_fill(mask == 0, NO_TOKEN)


def mtp_targets(
    labels: Tensor, mask: Tensor, modules: int, documents: Documents | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """The targets of each MTP module: (labels, mask) [b, s], module k's labels k + 1 further on.

    A position counts if all labels up to its own count and belong to its sequence, or to its document if
    `documents` are kept apart: nothing is predicted across an end.
    """
    counted = mask
    for depth in range(1, modules + 1):
        counted = mask * ahead(counted, 1, documents)
        yield ahead(labels, depth, documents), counted
