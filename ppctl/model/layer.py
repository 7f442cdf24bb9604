"""One decoder layer and its dense feed-forward, [b, s, h] -> [b, s, h] (microbatch, sequence, hidden).

Knows which blocks a layer is made of. Must not know stages, ranks, weights' values or schedules. Attribute names are
canonical parameter names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.model.attention import Attention
from ppctl.model.latent_attention import LatentAttention


class FeedForward(nn.Module):
    """SwiGLU [b, s, h] -> [b, s, h]: w2(silu(w1 x) * w3 x) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to every position."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer [b, s, h] -> [b, s, h]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention = LatentAttention(model) if model.multi_latent_attention else Attention(model)
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.feed_forward = FeedForward(model.hidden_size, model.ffn_hidden_size)
        self.ffn_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the feed-forward, to the residual stream `x`."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out
