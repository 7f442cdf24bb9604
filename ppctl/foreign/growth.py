"""Polynomials through measurements of several batches, and the moments that have the most bytes.

Knows numbers. Must not know what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ppctl.geometry.foreign_costs import Growth, Peak

BATCHES = ((1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
"""What is measured, for three lengths: sequences, and the place of the length. As many as a `Growth` has numbers."""
_SEQUENCES = (1, 2, 4, 16, 64)
_LENGTHS = tuple(2**n for n in range(5, 21))


def fitted(batches: Sequence[tuple[int, int]], values: Sequence[float]) -> Growth:
    """Of (sequences, tokens of each) and what was measured with them."""
    return _growth(_solved(batches, torch.tensor([values], dtype=torch.float64))[0], batches, max(values))


def peak(batches: Sequence[tuple[int, int]], traces: Sequence[Sequence[float]]) -> Peak:
    """The moments that have the most, for some batch; `traces` are the moments of each batch that was measured.

    Where other operators ran for other lengths, the moments cannot be told: the largest of each batch are one.
    """
    if len({len(trace) for trace in traces}) > 1 or not traces[0]:
        return (fitted(batches, [max(trace, default=0.0) for trace in traces]),)
    values = torch.tensor(traces, dtype=torch.float64).T
    values = torch.unique(values, dim=0)
    solved = _solved(batches, values)
    grid = torch.tensor([_terms(b, s) for b in _SEQUENCES for s in _LENGTHS], dtype=torch.float64)
    chosen = sorted({int(place) for place in (solved @ grid.T).argmax(dim=0)})
    return tuple(_growth(solved[place], batches, float(values[place].max())) for place in chosen)


def _terms(sequences: int, length: int) -> list[float]:
    return [1.0, sequences * length, sequences * length**2, length, length**2]


def _solved(batches: Sequence[tuple[int, int]], values: Tensor) -> Tensor:
    """The numbers of a `Growth` [n, 5] for measurements [n, batches]."""
    matrix = torch.tensor([_terms(*batch) for batch in batches], dtype=torch.float64)
    found: Tensor = torch.linalg.solve(matrix, values.T).T
    return found


def _growth(solved: Tensor, batches: Sequence[tuple[int, int]], largest: float) -> Growth:
    """What is no growth is none."""
    scale = [_terms(*batch) for batch in batches]
    bounds = [1e-6 * max(1.0, largest) / max(row[n] for row in scale) for n in range(5)]
    return Growth(
        *(0.0 if abs(each) < bound else round(each, 6) for each, bound in zip(solved.tolist(), bounds, strict=True))
    )
