"""Cross entropy of next-token prediction, summed so that no cut of the batch changes what a token weighs.

Knows logits and labels. Must not know microbatches, ranks or the schedule: the caller says how many tokens count.
Logits are a last stage's largest tensors: in float32 there are never more than LOSS_ROWS rows of them (decision 33).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ppctl.geometry.layers import LOSS_ROWS
from ppctl.model.mtp import ahead
from ppctl.model.packing import Documents

NO_TOKEN = -100
"""The label of a token that does not count: torch's losses ignore it."""


def token_losses(logits: Tensor, labels: Tensor, *, overwrite: bool = False) -> Tensor:
    """Cross entropy in nats per token, float32 [b, s], of logits [b, s, vocab_size] against labels [b, s] (int64).

    Loss and gradient have the bits of `F.cross_entropy(logits.float(), ...)`. What is kept for the backward is the
    logits and the labels. With `overwrite` the caller reads the logits no more: the backward writes their gradient into
    their memory, unless autograd keeps them for somebody else, and a second backward raises RuntimeError.
    """
    losses: Tensor = _TokenLosses.apply(logits, labels, overwrite)  # type: ignore[no-untyped-call]
    return losses


def microbatch_loss(
    logits: Tensor, labels: Tensor, mask: Tensor, total_tokens: float | Tensor, *, overwrite: bool = False
) -> Tensor:
    """One microbatch's share of the batch's loss: the sum over its unmasked tokens / `total_tokens`.

    `mask` [b, s] is 1 where a token counts; `total_tokens` is the number of unmasked tokens of the whole global batch,
    so that the shares of all microbatches and data-parallel ranks add up to the mean over the batch's tokens.
    `overwrite` as in `token_losses`.
    """
    return (token_losses(logits, labels, overwrite=overwrite) * mask).sum() / total_tokens


class _TokenLosses(torch.autograd.Function):
    """Softmax and loss are made row by row, so that rows can be taken block by block without another bit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, overwrite: bool) -> Tensor:
        ctx.save_for_backward(logits, labels)
        ctx.overwrite, ctx.overwritten = overwrite, False
        blocks = zip(*(each.split(LOSS_ROWS) for each in (logits.flatten(0, 1), labels.flatten())), strict=True)
        losses = [F.cross_entropy(rows.float(), wanted, reduction="none") for rows, wanted in blocks]
        return torch.cat(losses).view_as(labels)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.overwritten:
            raise RuntimeError("the logits of this loss were overwritten by their gradient in its first backward")
        logits, labels = ctx.saved_tensors
        ctx.overwritten = ctx.overwrite and logits.is_contiguous() and not _shared(logits)
        found = logits.detach() if ctx.overwritten else torch.empty_like(logits, memory_format=torch.contiguous_format)
        each = (logits.flatten(0, 1), labels.flatten(), gradients.flatten(), found.view(-1, found.shape[-1]))
        for rows, wanted, gradient, into in zip(*(tensor.split(LOSS_ROWS) for tensor in each), strict=True):
            into.copy_(_of_rows(rows, wanted, gradient))
        return found, None, None


def _of_rows(logits: Tensor, labels: Tensor, gradients: Tensor) -> Tensor:
    """The gradient, float32 [n, vocab_size], of logits [n, vocab_size], from those of their losses [n].

    The two operations that autograd runs in the backward of `F.cross_entropy`.
    """
    logs = torch.log_softmax(logits.float(), -1)
    whole, no_reduction = logs.new_ones(()), 0
    of_logs = torch.ops.aten.nll_loss_backward(gradients, logs, labels, None, no_reduction, NO_TOKEN, whole)
    found: Tensor = torch.ops.aten._log_softmax_backward_data(of_logs, logs, -1, torch.float32)
    return found


def _shared(tensor: Tensor) -> bool:
    """Whether other tensors look into this one's memory, such as an output that its operation saved.

    torch has no public count of them. Were this one wrong, autograd would refuse the backward that needs the old
    values: they have another version then.
    """
    return _holders(tensor) > _holders(torch.empty(0))


def _holders(tensor: Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def without(labels: Tensor, mask: Tensor) -> Tensor:
    """The labels [b, s] with NO_TOKEN where the mask says that a token does not count."""
    return labels.masked_fill(mask == 0, NO_TOKEN)


def mtp_targets(
    labels: Tensor, mask: Tensor, modules: int, documents: Documents | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """What each MTP module is held against: (labels, mask) [b, s], module k's labels k + 1 further on.

    A position counts where all labels up to its own count and belong to its sequence, or to its document where
    `documents` are kept apart: nothing is predicted across an end.
    """
    counted = mask
    for depth in range(1, modules + 1):
        counted = mask * ahead(counted, 1, documents)
        yield ahead(labels, depth, documents), counted
