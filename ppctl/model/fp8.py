"""Matrices in 8-bit floating point: which numbers share a scale, and how they are rounded.

`linear.py` multiplies them. Source of tiles of 1 x 128 for activations and 128 x 128 for weights: the DeepSeek-V3
report, arXiv:2412.19437, section 3.3.
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
_SMALLEST = torch.finfo(torch.float32).tiny
"""A scale below this has fewer bits, and its tile's largest number would not become the dtype's largest."""


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

    Computed in float32. A tile of zeros, or of numbers below 5e-36, has the scale 1; one with an infinity or a NaN
    becomes NaN.
    """
    (n, k), whole = matrix.shape, tile[1] or ALIGNED
    lacks = -k % whole if k else whole, -n % tile[0]
    tiles = _tiles(F.pad(matrix.detach(), (0, lacks[0], 0, lacks[1])) if any(lacks) else matrix.detach(), tile)
    scales = scales_of(torch.linalg.vector_norm(tiles, torch.inf, (1, 3)), dtype)
    values = torch.div(tiles, _of_tiles(scales)).to(dtype, memory_format=torch.contiguous_format)
    return Quantised(values.flatten(2).flatten(0, 1), scales, tile, (n, k))


def scales_of(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The float32 scales of tiles whose largest numbers, without signs, are given."""
    scales = largest.float() / LARGEST[dtype]
    # Contiguous, also for a transposed matrix: the kernels need this of both operands.
    return torch.where(scales < _SMALLEST, 1.0, scales).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True)
class Rounded:
    """An activation [..., in] in 8 bits, for several products with it; `x` is what gets the gradient."""

    x: Tensor
    quantised: Quantised

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The activation, and the values and scales of its rounded matrix."""
        return self.x, self.quantised.values, self.quantised.scales


Operand = Tensor | Rounded

MultiplyGroups = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(values a, scales a, values b, scales b, ends of groups [g], int32) -> the products in bfloat16.

By rows: a [n, k], scales [n]; b [g, m, k], scales [g, m] -> [n, m], each group's rows times the transpose of its b. By
sums: a [n, k], scales [g x n]; b [m, k], scales [g x m] -> [g, n, m], each group's columns of a times those of b.
"""


@dataclass(frozen=True, slots=True)
class Fp8:
    """How a run multiplies in 8 bits."""

    gradients: torch.dtype
    """Format of outputs' gradients; everything else is e4m3."""
    blockwise: bool
    """Scales for 1 x 128 numbers of an activation and 128 x 128 of a weight, instead of one for each row."""
    multiply: Multiply
    multiply_groups: MultiplyGroups | None = None
    """Multiplies all groups of rows with their weights at once, row-wise in e4m3; None: one group after another."""

    @property
    def _of_rows(self) -> tuple[int, int]:
        return 1, BLOCK if self.blockwise else 0

    def activation(self, matrix: Tensor) -> Quantised:
        """An activation [n, k], quantised."""
        return quantise(matrix, E4M3, self._of_rows)

    def activation_of(self, values: Tensor, scales: Tensor, shape: tuple[int, int]) -> Quantised:
        """The quantised activation with these values and scales; `shape` is (n, k)."""
        return Quantised(values, scales, self._of_rows, shape)

    def weight(self, matrix: Tensor) -> Quantised:
        """A weight [n, k], quantised."""
        return quantise(matrix, E4M3, (BLOCK, BLOCK) if self.blockwise else (1, 0))

    def gradient(self, matrix: Tensor) -> Quantised:
        """A gradient of an output [n, k], quantised."""
        return quantise(matrix, self.gradients, self._of_rows)

    def rounded(self, x: Operand) -> Rounded:
        """`x` [..., in] in 8 bits, once for all products that are given the result."""
        return x if isinstance(x, Rounded) else Rounded(x, self.activation(x.flatten(0, -2)))
