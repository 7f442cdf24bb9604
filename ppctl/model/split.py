"""Products whose weights are divided over ranks, and the exchanges beside them: how tokens and columns change places.

Between blocks a rank has hidden states of whole width: of all tokens, or under sequence parallelism of its own tokens.
Inside a block it has its own columns (heads, inner widths, a part of the vocabulary) of all tokens. `columns` and
`enter` lead in, `leave` leads out. All ranks of the split call them, in one order.

Source: Shoeybi et al., arXiv:1909.08053 (f and g); Korthikanti et al., arXiv:2205.05198 (their forms under sequence
parallelism; the input of `columns` is gathered again in its backward, so that only a rank's own tokens are kept).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ppctl.weight_gradients.deferred import DeferredGradients, ProductRule, deferring
from ppctl.weight_gradients.wide_sums import AtOnce

Pending = Callable[[], Tensor]
"""The result of an exchange that was started. Calling it waits; on a GPU the stream waits, not the host."""
Prepare = Callable[[Tensor], tuple[Tensor, ...]]
"""An activation -> x and what else a `ProductRule` keeps of it, made once for all products with the activation."""


class TensorSplit(Protocol):
    """The ranks over which weights are divided, as one of these ranks uses them."""

    rank: int
    size: int
    sequence: bool
    """Whether every rank has tokens of its own between blocks: equal runs of neighbours, in order of the ranks."""

    def start_gather(self, x: Tensor) -> Pending:
        """Start to gather the ranks' x [b, s / size, ...] to all tokens' [b, s, ...]; without `sequence` it is x."""

    def start_sum(self, x: Tensor) -> Pending:
        """Start to sum x [b, s, ...] over the ranks, for the own tokens [b, s / size, ...]; without `sequence` for all.

        The sum may overwrite x.
        """

    def add_up(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in the memory of x. A collective."""

    def largest(self, x: Tensor) -> Tensor:
        """The maximum over the ranks, in the memory of x. A collective."""


class _Alone:
    """In place of a `TensorSplit`: one rank, which has all tokens and all columns."""

    def start_gather(self, x: Tensor) -> Pending:
        return lambda: x

    start_sum = start_gather


ALONE: Any = _Alone()


def columns(
    split: TensorSplit, rule: ProductRule, prepare: Prepare, x: Tensor, weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """x [b, tokens, in] times each of the weights [own out, in] by `rule`: [b, s, own out] of all tokens.

    The backward gathers x again beside the products that need no x, and sums the gradient of x beside those for the
    weights' gradients. If these are deferred, x is gathered once more when they are made.
    """
    later: DeferredGradients | AtOnce | None
    later, *others = [deferring(weight) for weight in weights]
    assert all(other is later for other in others)  # a stage's `whole` names all weights of one call, or none
    if split is ALONE and later is None:
        later = AtOnce()
    places = () if later is None else tuple(later.place(weight, cast=False) for weight in weights)
    if later is not None:
        x, weights = x if x.requires_grad else x.detach().requires_grad_(), [weight.detach() for weight in weights]
    call = _ColumnsCall(split, rule, prepare, later, places)
    outputs: tuple[Tensor, ...] = exchange(_ColumnProducts, call, x, *weights)
    return outputs


def enter(x: Tensor, split: TensorSplit | None) -> Tensor:
    """The hidden state x of all tokens, for a block in which every rank uses its own columns."""
    if split is None:
        return x
    entered: Tensor = exchange(_Enter, x, split)
    return entered


def leave(x: Tensor, split: TensorSplit | None) -> Tensor:
    """The sum over ranks of what each computed from its own columns: a hidden state between blocks. May overwrite x."""
    if split is None:
        return x
    left: Tensor = exchange(_Leave, x, split)
    return left


def exchange(function: type[torch.autograd.Function], *inputs: Any) -> Any:
    """`function.apply(*inputs)`, of a function with exchanges; `compile_stage` leaves it out of compiled graphs."""
    return function.apply(*inputs)


class _ColumnsCall(NamedTuple):
    split: TensorSplit
    rule: ProductRule
    prepare: Prepare
    deferred: DeferredGradients | AtOnce | None
    places: tuple[Tensor, ...]
    """The weights that are deferred, which are no part of the graph."""


class _ColumnProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _ColumnsCall, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(x, *weights)
        whole, *kept = call.prepare(call.split.start_gather(x)())
        return tuple(call.rule.multiply(whole, weight, None, *kept) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (split, rule, prepare, deferred, places), (x, *weights) = ctx.call, ctx.saved_tensors
        now = any(ctx.needs_input_grad[2:])
        coming = split.start_gather(x) if now else None
        of_x = rule.of_input(gradients[0], None, weights[0])
        for gradient, weight in zip(gradients[1:], weights[1:], strict=True):
            if rule.add_of_input is None:
                of_x.add_(rule.of_input(gradient, None, weight))
            else:
                of_x = rule.add_of_input(of_x, gradient, weight)
        summing = split.start_sum(of_x)
        del of_x
        of_weights: list[Tensor | None] = [None] * len(weights)
        if coming is not None:
            whole, *kept = prepare(coming())
            del coming
            of_weights = [rule.of_factor(g, whole, w, *kept) for g, w in zip(gradients, weights, strict=True)]
        if deferred is not None:
            again = _GatheredAgain(split, prepare, len(places))
            for gradient, place in zip(gradients, places, strict=True):
                deferred.put(place, place, partial(_of_weight, gradient, x, place, rule=rule, again=again))
        return None, summing(), *of_weights


class _GatheredAgain:
    """The operands of several products, gathered when the first gradient is made and freed after the last one."""

    def __init__(self, split: TensorSplit, prepare: Prepare, uses: int) -> None:
        self.split, self.prepare, self.uses = split, prepare, uses
        self.operands: tuple[Tensor, ...] | None = None

    def of(self, x: Tensor) -> tuple[Tensor, ...]:
        """The operands made of x, this rank's tokens. Counts as one of the `uses`."""
        operands = self.operands or self.prepare(self.split.start_gather(x)())
        self.uses -= 1
        self.operands = operands if self.uses else None
        return operands


def _of_weight(gradient: Tensor, x: Tensor, weight: Tensor, rule: ProductRule, again: _GatheredAgain) -> Tensor | None:
    whole, *kept = again.of(x)
    return rule.of_factor(gradient, whole, weight, *kept)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: TensorSplit) -> Tensor:
        ctx.split = split
        return split.start_gather(x)() if split.sequence else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,), split = gradients, ctx.split
        # The sum is made in the gradient's memory, which others may read.
        return split.start_sum(gradient if split.sequence else gradient.clone())(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, split: TensorSplit) -> Tensor:
        ctx.split = split
        total = split.start_sum(x)()
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.split.start_gather(gradients[0])(), None
