"""Several documents in one sequence, each as if it stood alone; and what draws of dropout depend on.

Attention runs document by document, or takes all documents at once by their bounds: nothing of the size of a mask
[s, s] is ever kept, and no score is computed to be masked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from ppctl.model.dropout import Draws
from ppctl.sequence_halves import Lengths


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a microbatch's rows."""

    lengths: Lengths
    bounds: Tensor | None = field(default=None, compare=False)
    """[documents + 1] int32, on the device: where each begins, and the last ends, in the rows put one after another.
    For kernels that take all documents at once."""

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(max(row) for row in self.lengths)

    def each(self, function: Callable[..., Tensor], *tensors: Tensor, dim: int) -> Tensor:
        """`function` of every document by itself, joined again; rows are dimension 0, a row's tokens are `dim`."""
        rows = []
        for row, lengths in enumerate(self.lengths):
            parts = zip(*(tensor[row : row + 1].split(lengths, dim) for tensor in tensors), strict=True)
            rows.append(torch.cat([function(*part) for part in parts], dim))
        return torch.cat(rows)


class Packing(NamedTuple):
    """Positions, documents and draws of a microbatch, which a stage needs beside its tensors."""

    positions: Tensor | None = None
    """[b, s] int64: of every token; None counts from the start of the row."""
    documents: Documents | None = None
    """None lets every token see all before it."""
    draws: Draws | None = None
    """The source of dropout's draws, in training; None drops nothing."""

    @classmethod
    def of(
        cls,
        positions: Tensor | None,
        lengths: Sequence[Lengths] | None,
        mb: int,
        bounds: Sequence[Tensor] | None = None,
        draws: Draws | None = None,
    ) -> Packing:
        """For microbatch `mb`: its part of `positions` [m, b, s], its rows' `lengths`, and their `bounds` if given."""
        documents = None if lengths is None else Documents(lengths[mb], None if bounds is None else bounds[mb])
        return cls(None if positions is None else positions[mb], documents, draws)


def bounds_of(lengths: Sequence[Lengths], device: torch.device) -> Sequence[Tensor]:
    """`Documents.bounds` of every microbatch, by one copy to the device that the host does not wait for."""
    bounds = [[0, *accumulate(chain.from_iterable(rows))] for rows in lengths]
    all_of_them = torch.tensor([*chain.from_iterable(bounds)], dtype=torch.int32, device="cpu")
    if device.type == "cuda":
        all_of_them = all_of_them.pin_memory().to(device, non_blocking=True)
    parts: tuple[Tensor, ...] = all_of_them.split([len(one) for one in bounds])
    return parts


ROWS = Packing()
"""Every row is one document, and nothing is dropped."""
