"""One decoder layer, [b, s, h] -> [b, s, h] (microbatch, sequence, hidden).

Knows which blocks a layer is made of. Must not know stages, ranks, weights' values or schedules. Attribute names are
canonical parameter names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.model.attention import Attention
from ppctl.model.feed_forward import FeedForward, MixtureOfExperts
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.latent_attention import LatentAttention
from ppctl.model.packing import Documents


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer [b, s, h] -> [b, s, h], with a dense feed-forward or with experts (`moe`)."""

    def __init__(self, model: ModelConfig, *, moe: bool = False, kernels: Kernels = ON_CPU) -> None:
        super().__init__()
        self.attention = (LatentAttention if model.multi_latent_attention else Attention)(model, kernels)
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.feed_forward = None if moe else FeedForward(model.hidden_size, model.ffn_hidden_size, kernels)
        self.moe = MixtureOfExperts(model, kernels) if moe else None
        self.ffn_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, documents: Documents | None = None) -> Tensor:
        """Add attention, then the feed-forward or the experts, to the residual stream `x`."""
        x = x + self.attention(self.attention_norm(x), cos, sin, documents)
        transform = self.feed_forward if self.moe is None else self.moe
        assert transform is not None
        out: Tensor = x + transform(self.ffn_norm(x))
        return out
