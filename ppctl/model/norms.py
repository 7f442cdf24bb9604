"""Which norm a model has."""

from __future__ import annotations

from torch import nn

from ppctl.config.schema import ModelConfig


def make_norm(model: ModelConfig, width: int, epsilon: float | None = None) -> nn.Module:
    """A norm over the last dimension, by default with the model's own epsilon; LayerNorm has a bias."""
    kind = nn.LayerNorm if model.normalization == "LayerNorm" else nn.RMSNorm
    return kind(width, eps=model.norm_epsilon if epsilon is None else epsilon)
