"""Matrices in 8-bit floating point: which numbers share a scale, and how they are rounded.

Knows tiles and scales. Must not know how matrices are multiplied (`linear.py`), nor layers. Source of tiles of 1 x 128
for activations and 128 x 128 for weights: the DeepSeek-V3 report, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
ALIGNED, BLOCK = 16, 128


@dataclass(frozen=True, slots=True)
class Quantised:
    """A matrix [n, k] as `values` x `scales`, k being the dimension that a product sums over."""

    values: Tensor
    """[n', k'] in 8 bits: n and k filled up with zeros to whole tiles, whole rows to a multiple of 16."""
    scales: Tensor
    """float32 [n' / rows, k' / columns]."""
    tile: tuple[int, int]
    """Rows and columns that share a scale; 0 columns are a whole row."""
    shape: tuple[int, int]
    """n and k."""

    def dequantised(self) -> Tensor:
        """float32 [n, k]."""
        tiles = _tiles(self.values.float(), self.tile) * _of_tiles(self.scales)
        return tiles.flatten(2).flatten(0, 1).narrow(0, 0, self.shape[0]).narrow(1, 0, self.shape[1])


def _tiles(matrix: Tensor, tile: tuple[int, int]) -> Tensor:
    """`matrix` [n', k'] of whole tiles as [n' / rows, rows, k' / columns, columns]."""
    n, k = matrix.shape
    rows, columns = tile[0], tile[1] or k
    return matrix.view(n // rows, rows, k // columns, columns)


def _of_tiles(scales: Tensor) -> Tensor:
    return scales.unsqueeze(1).unsqueeze(3)


Multiply = Callable[[Quantised, Quantised], Tensor]
"""(a [n, k], b [m, k]) -> a times the transpose of b, [n, m]."""


def quantise(matrix: Tensor, dtype: torch.dtype, tile: tuple[int, int]) -> Quantised:
    """`matrix` [n, k], each tile scaled so that its largest number becomes the dtype's largest.

    Computed in float32. A tile of zeros has the scale 1; one with an infinity or a NaN becomes NaN.
    """
    (n, k), whole, limit = matrix.shape, tile[1] or ALIGNED, LARGEST[dtype]
    padded = F.pad(matrix.detach().float(), (0, -k % whole if k else whole, 0, -n % tile[0]))
    tiles = _tiles(padded, tile)
    scales = tiles.abs().amax((1, 3)) / limit
    # Row by row, also for a transposed matrix: the kernels want both operands so.
    scales = torch.where(scales == 0, 1.0, scales).clone(memory_format=torch.contiguous_format)
    values = (tiles / _of_tiles(scales)).clamp(-limit, limit).to(dtype, memory_format=torch.contiguous_format)
    return Quantised(values.flatten(2).flatten(0, 1), scales, tile, (n, k))


@dataclass(frozen=True, slots=True)
class Fp8:
    """How a run multiplies in 8 bits."""

    gradients: torch.dtype
    """Format of outputs' gradients; everything else is e4m3."""
    blockwise: bool
    """Scales for 1 x 128 numbers of an activation and 128 x 128 of a weight, instead of one for each row."""
    multiply: Multiply

    def activation(self, matrix: Tensor) -> Quantised:
        """An activation [n, k]."""
        return quantise(matrix, E4M3, (1, BLOCK if self.blockwise else 0))

    def weight(self, matrix: Tensor) -> Quantised:
        """A weight [n, k]."""
        return quantise(matrix, E4M3, (BLOCK, BLOCK) if self.blockwise else (1, 0))

    def gradient(self, matrix: Tensor) -> Quantised:
        """A gradient of an output [n, k]."""
        return quantise(matrix, self.gradients, (1, BLOCK if self.blockwise else 0))
