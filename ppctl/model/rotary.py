"""Rotary positions: the tables of a stage and how a head is turned.

Knows positions and frequencies. Must not know projections, layers or weights.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Rotary:
    """Tables of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), shared by the layers of a stage.

    Frequencies are `base ** (-2i / dim)` for i < dim / 2; dimension i turns with dimension i + dim / 2 (GPT-NeoX's
    pairing, as Hugging Face stores Llama). The longest table asked for so far is kept, and shorter ones are its slices.
    """

    def __init__(self, dim: int, base: float) -> None:
        self.dim = dim
        self.base = base
        self._tables = torch.empty(2, 0, dim)

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [s, dim] for the positions of `like` [b, s, ...], on its device and in its dtype."""
        length = like.shape[1]
        kept = self._tables
        if kept.shape[1] < length or kept.device != like.device or kept.dtype != like.dtype:
            self._tables = self._compute(length, like)
        return self._tables[0, :length], self._tables[1, :length]

    # A table first made during generation must serve training too: not an inference tensor.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self, length: int, like: Tensor) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=like.device) / self.dim
        positions = torch.arange(length, dtype=torch.float32, device=like.device)
        angles = torch.outer(positions, self.base**-exponents).repeat(1, 2)
        return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head [b, heads, s, dim] by its position's angles [s, dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
