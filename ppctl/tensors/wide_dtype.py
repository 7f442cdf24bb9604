"""The dtype of sums: float32, or float64 in a float64 model."""

from __future__ import annotations

import torch


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of norms, scores, losses, sums of gradients and masters, for weights or activations of `dtype`. Equals
    `torch.promote_types(dtype, torch.float32)`, but modes that watch operations do not see it."""
    return torch.float64 if dtype == torch.float64 else torch.float32
