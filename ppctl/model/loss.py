"""Cross entropy of next-token prediction, summed so that no cut of the batch changes what a token weighs.

Knows logits and labels. Must not know how many microbatches there are, ranks or the
schedule: who calls says how many tokens count.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy in nats per token, float32 [b, s], of logits [b, s, vocab_size] against labels [b, s] (int64)."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view_as(labels)


def microbatch_loss(logits: Tensor, labels: Tensor, mask: Tensor, total_tokens: float) -> Tensor:
    """One microbatch's share of the batch's loss: the sum over its unmasked tokens / `total_tokens`.

    `mask` [b, s] is 1 where a token counts; `total_tokens` is the number of unmasked tokens of the whole global batch,
    so that the shares of all microbatches and data-parallel ranks add up to the mean over the batch's tokens.
    """
    return (token_losses(logits, labels) * mask).sum() / total_tokens
