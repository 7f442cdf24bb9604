"""The next token, from the logits of all words: the likeliest one, or a draw from the likely ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sampling(NamedTuple):
    """How a token is drawn. The order is that of transformers: temperature, then `top_k`, then `top_p`."""

    temperature: float = 1.0
    """Logits are divided by it: below 1 likely tokens become likelier."""
    top_k: int | None = None
    """Draw from so many of the likeliest tokens; None from all."""
    top_p: float = 1.0
    """Draw from the fewest tokens whose probabilities reach this sum."""


def drawn(logits: Tensor, sampling: Sampling, dice: torch.Generator) -> Tensor:
    """An index into `logits` [words], as a tensor [1] on the CPU, drawn there with `dice`."""
    words = logits.numel()
    values, tokens = logits.detach().float().cpu().topk(min(sampling.top_k or words, words))
    chances = torch.softmax(values / sampling.temperature, dim=0)
    if sampling.top_p < 1:
        chances = chances * (chances.cumsum(0) - chances < sampling.top_p)
    return tokens[torch.multinomial(chances, 1, generator=dice)]
