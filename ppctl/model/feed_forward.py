"""The dense feed-forward, [b, s, h] -> [b, s, h]. Knows its two sizes, and nothing else.

Attribute names are canonical parameter names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.model.linear import Linear


class FeedForward(nn.Module):
    """SwiGLU [b, s, h] -> [b, s, h]: w2(silu(w1 x) * w3 x) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w1 = Linear(hidden_size, ffn_hidden_size)
        self.w2 = Linear(ffn_hidden_size, hidden_size)
        self.w3 = Linear(hidden_size, ffn_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to every position."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out
