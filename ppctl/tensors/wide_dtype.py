"""In which numbers sums are made: float32, or float64 if a model has that."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, scores, losses, sums of gradients and masters, for weights or activations of this one. As
    `torch.promote_types(dtype, torch.float32)`, which whoever watches operations would see."""
    return torch.float64 if dtype == torch.float64 else torch.float32
