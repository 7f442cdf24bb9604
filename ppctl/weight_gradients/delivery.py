"""W's delivery of weight gradients to autograd: the sum of a weight's parts, once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, autograd
from torch.autograd.graph import _engine_run_backward

from ppctl.errors import Problem, TrainingError

AT_ONCE = 16 * 2**20
"""Bytes of weights for which autograd is called once in W: a call takes longer than a small product."""

TOGETHER = 2**19
"""Bytes of weights whose gradients are made together in such a call, before the next ones. More would leave the
processor's cache; with less, the overhead exceeds the gain."""

Make = Callable[[], Tensor | None]
"""A function that computes one use's part of a weight's gradient, as a new tensor; None if it stores the part
itself."""

LEAVE_WHOLE = "pipeline.pp_schedule=interleaved_1f1b\nwith run_schedule, StageProgram(..., whole=(weight,))"


class Use(NamedTuple):
    """A weight in one product (a parameter, or a view of one), and this use's part of its gradient."""

    weight: Tensor
    place: Tensor
    """The weight's node that keeps this use's place among others (`DeferredGradients.place`)."""
    make: Make
    version: int
    """Sum of the versions of the tensors that `make` reads; in-place operations increase it."""


def operands(weight: Tensor, make: Make) -> Iterator[Tensor]:
    """The tensors kept for one use of a weight: all that `make` reads except the weight."""
    if isinstance(make, partial):
        yield from (held for held in make.args if isinstance(held, Tensor) and held is not weight)


def version_of(weight: Tensor, make: Make) -> int:
    """The versions of `operands`, summed."""
    return sum(held._version for held in operands(weight, make))


def deliver(groups: list[list[Use]]) -> None:
    """Give parameters the sums of their uses' parts, through autograd, each group once the previous one is stored.
    Empties `groups`. Raises TrainingError (PP-E718) as `_sums`."""
    # Autograd runs the last made node first, and stores a gradient before it goes on.
    roots = tuple(_sums(groups.pop()) for _ in range(len(groups)))
    seeds = tuple(root.detach() for root in roots)
    # The core of torch.autograd.backward, which itself imports sympy.
    _engine_run_backward(roots, seeds, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _sums(uses: list[Use]) -> Tensor:
    """Return the output of an autograd node whose backward computes the weights' gradients. Raises TrainingError
    (PP-E718) if a tensor from which the gradients are computed was changed in place."""
    weights: dict[int, Tensor] = {}
    makes: dict[int, list[Make]] = {}
    for weight, place, make, version in uses:
        if version_of(weight, make) != version:
            message = (
                f"what the gradient of a weight of shape {list(weight.shape)} is computed from (the input of its "
                "product, the gradient of its result) was changed in place between I and W"
            )
            raise TrainingError(Problem("PP-E718", message, LEAVE_WHOLE))
        weights[id(place)] = place
        makes.setdefault(id(place), []).append(make)
    return _apply_sums(list(makes.values()), *weights.values())


class _Sums(autograd.Function):
    """Its backward makes gradients, so that nothing else refers to them: otherwise autograd would copy them."""

    @staticmethod
    def forward(ctx: Any, makes: list[list[Make]], *weights: Tensor) -> Tensor:
        ctx.makes = makes
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return None, *map(_sum, ctx.makes)


_apply_sums: Callable[..., Tensor] = super(autograd.Function, _Sums).apply


def _sum(makes: list[Make]) -> Tensor | None:
    """Make the parts and return their sum, added in order; empties `makes`, so that operands are freed early."""
    makes.reverse()
    total = makes.pop()()
    while makes:
        part = makes.pop()()
        if part is not None:
            total = part if total is None else total.add_(part)
    return total
