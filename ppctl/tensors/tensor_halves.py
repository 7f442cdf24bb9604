"""Tensors that have whole sequences, or each rank's halves of them, along a dim (`sequence_halves.py` says which)."""

from __future__ import annotations

import torch
from torch import Tensor

from ppctl.sequence_halves import Halves, chunk_owners


def own_halves(whole: Tensor, halves: Halves, dim: int) -> Tensor:
    """A rank's halves of a tensor that has the whole sequence along `dim`; a copy."""
    return torch.cat([whole.narrow(dim, half.start, len(half)) for half in halves.positions], dim)


def own_positions(halves: Halves, device: torch.device | None = None) -> Tensor:
    """The position of each of a rank's tokens in the whole sequence, int64: for rotary positions."""
    return torch.cat([torch.arange(half.start, half.stop, device=device) for half in halves.positions])


def to_whole(parts: Tensor, dim: int) -> Tensor:
    """All ranks' halves `parts` [ranks, ...] as whole sequences; `dim` is counted without the ranks'."""
    chunks = [part.chunk(2, dim) for part in parts]
    return torch.cat([chunks[rank][half] for rank, half in chunk_owners(len(parts))], dim)


def to_ranks(whole: Tensor, ranks: int, dim: int) -> Tensor:
    """The inverse of `to_whole`: each rank's halves [ranks, ...] of `whole`; `dim` is not negative."""
    chunks = whole.unflatten(dim, (2 * ranks, -1)).movedim(dim, 0)
    return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], dim + 1)
