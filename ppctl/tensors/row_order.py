"""Rows of a tensor in another order, with gradients that are gathers as well.

Autograd's own gradient of a gather is a sum into zeros: it takes twice the memory, and on a GPU atomic additions,
although every row of a permutation is read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def reorder(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """`rows[order]` for rows [n, ...], where `order` [n] (int64) is a permutation and `inverse` its inverse."""
    out: Tensor = _Reorder.apply(rows, order, inverse)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse), None, None


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation [n] (int64)."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
