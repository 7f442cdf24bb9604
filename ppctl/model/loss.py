"""Cross entropy of next-token prediction, summed so that no cut of the batch changes what a token weighs.

Knows logits and labels. Must not know microbatches, ranks or the schedule: the caller says how many tokens count.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from ppctl.model.mtp import ahead
from ppctl.model.packing import Documents

NO_TOKEN = -100
"""The label of a token that does not count: torch's losses ignore it."""


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats per token, float32 [b, s], of logits [b, s, vocab_size] against labels [b, s] (int64)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)


def microbatch_loss(logits: Tensor, labels: Tensor, mask: Tensor, total_tokens: float | Tensor) -> Tensor:
    """One microbatch's share of the batch's loss: the sum over its unmasked tokens / `total_tokens`.

    `mask` [b, s] is 1 where a token counts; `total_tokens` is the number of unmasked tokens of the whole global batch,
    so that the shares of all microbatches and data-parallel ranks add up to the mean over the batch's tokens.
    """
    return (token_losses(logits, labels) * mask).sum() / total_tokens


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
