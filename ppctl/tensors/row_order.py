"""Rows of a tensor in another order, and sums of weighted rows, with gradients that are gathers as well.

Knows permutations. Must not know what rows mean. Autograd's own gradient of a gather is a sum into zeros: it takes
twice the memory, and on a GPU atomic additions, although every row of a permutation is read once.
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


def repeat_in_order(rows: Tensor, times: int, order: Tensor, inverse: Tensor) -> Tensor:
    """Each of the rows [n, h] `times` times, and these reordered: [n x times, h]. Their gradients are summed."""
    out: Tensor = _RepeatInOrder.apply(rows, times, order, inverse)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _RepeatInOrder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, times: int, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.times = times
        return rows.index_select(0, order // times)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return gradients[0].index_select(0, inverse).unflatten(0, (-1, ctx.times)).sum(1), None, None, None


def weighted_sum(rows: Tensor, weights: Tensor) -> Tensor:
    """The sum over K of rows [..., K, h] times weights [..., K]: [..., h].

    Its backward makes one tensor of the size of `rows` at a time, and autograd's own two.
    """
    out: Tensor = _WeightedSum.apply(rows, weights)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights)
        return (rows * weights[..., None]).sum(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        rows, weights = ctx.saved_tensors
        gradient = gradients[0].unsqueeze(-2)
        of_weights = (gradient * rows).sum(-1)
        return gradient * weights[..., None], of_weights
