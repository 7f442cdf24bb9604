"""One decoder layer, [b, s, h] -> [b, s, h] (microbatch, sequence, hidden).

Attribute names are canonical parameter names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.model.attention import Attention, LatentAttention
from ppctl.model.dropout import Draws, Dropout
from ppctl.model.feed_forward import FeedForward, MixtureOfExperts
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.norms import make_norm
from ppctl.model.packing import Documents


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer [b, s, h] -> [b, s, h], with a dense feed-forward or with experts (`moe`)."""

    def __init__(self, model: ModelConfig, *, moe: bool = False, kernels: Kernels = ON_CPU) -> None:
        super().__init__()
        self.attention = (LatentAttention if model.multi_latent_attention else Attention)(model, kernels)
        self.attention_norm = make_norm(model, model.hidden_size)
        self.feed_forward = None if moe else FeedForward(model, model.ffn_hidden_size, kernels)
        self.moe = MixtureOfExperts(model, kernels) if moe else None
        self.ffn_norm = make_norm(model, model.hidden_size)
        self.after_attention = Dropout(model.hidden_dropout)
        self.after_ffn = Dropout(model.hidden_dropout)

    def forward(
        self, x: Tensor, turns: Tensor | None, documents: Documents | None = None, draws: Draws | None = None
    ) -> Tensor:
        """Add attention, then feed-forward or experts, to the residual stream `x`; `draws` drop elements of both."""
        x = x + self.after_attention(self.attention(self.attention_norm(x), turns, documents, draws), draws)
        transform = self.feed_forward if self.moe is None else self.moe
        assert transform is not None
        out: Tensor = x + self.after_ffn(transform(self.ffn_norm(x)), draws)
        return out
