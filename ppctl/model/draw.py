"""The next token, drawn from the logits of the whole vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def drawn(
    logits: Tensor, dice: torch.Generator, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0
) -> Tensor:
    """A token drawn from `logits` [words] as transformers does, a tensor [1] on the CPU, where `dice` is, too.
    `temperature` divides the logits; the token is one of the `top_k` largest (None: all), and of these one of the
    fewest whose probabilities reach `top_p`."""
    words = logits.numel()
    values, tokens = logits.detach().float().cpu().topk(min(top_k or words, words))
    chances = torch.softmax(values / temperature, dim=0)
    if top_p < 1:
        chances = chances * (chances.cumsum(0) - chances < top_p)
    return tokens[torch.multinomial(chances, 1, generator=dice)]
