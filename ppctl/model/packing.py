"""Several documents in one sequence, each as if it stood alone.

Knows rows and the lengths of what lies in them. Must not know tokens, nor what is done with a document. Attention goes
document by document: nothing of the size of a mask [s, s] is ever kept, and no score is computed to be thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a microbatch's rows: `lengths[b]` are their tokens, in order, and add up to the row."""

    lengths: tuple[tuple[int, ...], ...]

    def each(self, function: Callable[..., Tensor], *tensors: Tensor, dim: int) -> Tensor:
        """`function` of every document by itself, put together again; rows are dimension 0, a row's tokens `dim`."""
        rows = []
        for row, lengths in enumerate(self.lengths):
            parts = zip(*(tensor[row : row + 1].split(lengths, dim) for tensor in tensors), strict=True)
            rows.append(torch.cat([function(*part) for part in parts], dim))
        return torch.cat(rows)


class Packing(NamedTuple):
    """What a stage has to know of the documents in a microbatch; where both are None, a row is one document."""

    positions: Tensor | None = None
    """[b, s] int64: of every token; None counts from the start of the row."""
    documents: Documents | None = None
    """None lets every token see all before it."""

    @classmethod
    def of(cls, positions: Tensor | None, lengths: Sequence[tuple[tuple[int, ...], ...]] | None, mb: int) -> Packing:
        """Of microbatch `mb`: its part of `positions` [m, b, s], and its rows' `lengths`, by microbatch."""
        return cls(None if positions is None else positions[mb], None if lengths is None else Documents(lengths[mb]))


ROWS = Packing()
"""Every row is one document."""
