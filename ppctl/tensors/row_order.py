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
        return _sum_of_rows(gradients[0], inverse, ctx.times), None, None, None


def weighted_sum(rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The sum over K of reordered rows times weights [..., K]: [..., h].

    Of `rows` [n x K, h] the one for weight number i is `rows[inverse[i]]`; `order` [n x K] is the inverse permutation.
    Each product is rounded, and so is the sum. The backward makes one tensor of the size of `rows` at a time.
    """
    out: Tensor = _WeightedSum.apply(rows, weights, order, inverse)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _WeightedSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order, inverse)
        return _scaled_rows(rows, inverse, weights.flatten()).view(*weights.shape, -1).sum(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, weights, order, inverse = ctx.saved_tensors
        gradient, token = gradients[0].flatten(0, -2), order // weights.shape[-1]
        of_weights = gradient.index_select(0, token).mul_(rows).sum(-1).index_select(0, inverse).view_as(weights)
        return _scaled_rows(gradient, token, weights.flatten().index_select(0, order)), of_weights, None, None


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation [n] (int64), by one write for each number and not by sorting."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def _scaled_rows(rows: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
    """The rows [n, h] with these numbers [m], each times its weight [m], rounded: [m, h].

    On a device that is one kernel, a sum over bags of one row. The CPU's rounds 16-bit numbers in another way.
    """
    if rows.device.type == "cpu":
        return rows.index_select(0, numbers).mul_(weights[:, None])
    bags = torch.arange(len(numbers), device=numbers.device)
    return torch.embedding_bag(rows.detach(), numbers, bags, False, 0, False, weights.detach())[0]


def _sum_of_rows(rows: Tensor, numbers: Tensor, times: int) -> Tensor:
    """The sums of each `times` neighbours of the rows [n, h] with these numbers, in float32 and then rounded."""
    if rows.device.type == "cpu":
        gathered: Tensor = rows.index_select(0, numbers).unflatten(0, (-1, times))
        return gathered.sum(1)
    bags = torch.arange(0, len(numbers), times, device=numbers.device)
    return torch.embedding_bag(rows.detach(), numbers, bags, False, 0, False)[0]
