"""Products with a weight whose gradient can be deferred, each with the formulas of torch's own autograd."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ppctl.weight_gradients.deferred import DeferredGradients, ProductRule, deferring, multiply
from ppctl.weight_gradients.wide_sums import AtOnce, add_gradient, sum_of


def linear(gradients: DeferredGradients | AtOnce, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`: x [..., in], at least two dims, weight [out, in], bias [out]: [..., out].

    If the weight has a sum of its gradients, the backward adds to it.
    """
    total = sum_of(weight)
    if total is not None:  # with a sum nothing is cast
        rule = ProductRule(F.linear, _of_input, partial(add_gradient, total))
        return multiply(gradients, rule, weight, x, bias=bias)
    return product(gradients, _LINEAR, x, weight, bias)


def product(
    gradients: DeferredGradients | AtOnce, rule: ProductRule, x: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """`rule`'s product of x and `weight`, with all operands cast as autocast would cast them."""
    x, factor, bias = _cast(x, weight, bias)
    return multiply(gradients, rule, weight, x, bias=bias, factor=factor)


def grouped_mm(gradients: DeferredGradients, rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """`F.grouped_mm`: rows [n, in], of which group g's end before `ends[g]`, weight [groups, in, out]: [n, out]."""
    return multiply(gradients, _GROUPED, weight, rows, ends)


def spaced(x: Tensor, weight: Tensor, between: Tensor, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Multiply x [b, s, in] by the transpose of a weight whose outputs are groups of two parts, `widths` wide. Return
    the first parts with `between` [b, 1, s, gap] behind each, [b, groups, s, first + gap], and the second parts,
    [b, groups, s, second].

    Both are views of one memory, into which the product writes. Only for weights with a `wide_sum`."""
    both: tuple[Tensor, Tensor] = _Spaced.apply(x, between, deferring(weight) or AtOnce(), [weight], widths)  # type: ignore[no-untyped-call]  # torch's own
    return both


class _Spaced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, between: Tensor, later: DeferredGradients | AtOnce, weight: list[Tensor], widths: list[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        (ctx.weight,), ctx.later, (ctx.first, second) = weight, later, widths
        rows, gap = ctx.weight.detach().unflatten(0, (-1, ctx.first + second)), between.shape[-1]
        first, rest = rows.split(widths, 1)
        apart = torch.cat((first, rows.new_empty(len(rows), gap, rows.shape[2]), rest), 1)
        out = F.linear(x, apart.flatten(0, 1)).unflatten(-1, apart.shape[:2]).transpose(1, 2)
        keys, values = out.split((ctx.first + gap, second), -1)
        keys[..., ctx.first :].copy_(between)
        return keys, values

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (of_keys, of_values), (x,), weight = gradients, ctx.saved_tensors, ctx.weight
        parts = of_keys[..., : ctx.first].transpose(1, 2), of_values.transpose(1, 2)
        of_outputs, total = torch.cat(parts, -1).flatten(2), sum_of(weight)
        assert total is not None
        of_x = _of_input(of_outputs, x, weight)
        ctx.later.put(weight, weight, partial(add_gradient, total, of_outputs, x, weight))
        return of_x, of_keys[..., ctx.first :].sum(1, keepdim=True), None, None, None


def embedding(
    gradients: DeferredGradients, numbers: Tensor, weight: Tensor, padding: int = -1, *, by_frequency: bool = False
) -> Tensor:
    """`F.embedding`: the rows of weight [n, h] with these numbers; the row `padding` gets no gradient."""

    def look_up(numbers: Tensor, factor: Tensor, _: None) -> Tensor:
        return torch.embedding(factor, numbers, padding, by_frequency, False)

    def of_factor(gradient: Tensor, numbers: Tensor, weight: Tensor) -> Tensor:
        backward = torch.ops.aten.embedding_dense_backward
        of_weight: Tensor = backward(gradient, numbers, len(weight), padding, by_frequency)
        return of_weight

    return multiply(gradients, ProductRule(look_up, _nothing, of_factor), weight, numbers)


def _cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(x, the factor if it is another tensor than the weight, bias), as autocast would cast them."""
    if not torch._C._is_any_autocast_enabled():
        return x, None, bias
    kind = x.device.type
    if not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)) or x.dtype == torch.float64:
        return x, None, bias
    dtype = torch.get_autocast_dtype(kind)
    # The copy needs a gradient, as the weight does: torch's folding of a product's dims depends on this.
    factor = None if weight.dtype == dtype else weight.detach().to(dtype).requires_grad_()
    return x.to(dtype), factor, None if bias is None else bias.to(dtype)


def _by_columns(matrix: Tensor) -> bool:
    """Whether a matrix lies in memory column by column: autograd's formulas for its gradient follow that layout."""
    rows, stride = matrix.shape[0], matrix.stride()
    return stride[0] == 1 and stride[1] == rows


def _rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def _of_left(gradient: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """The gradient of x in x @ matrix."""
    rows = _rows(gradient)
    if _by_columns(_rows(x)):
        return matrix.mm(rows.t()).t().reshape(x.shape)
    of_rows = rows.mm(matrix.t())
    return of_rows if x.dim() == 2 else of_rows.reshape(x.shape)


def _of_input(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of x in x @ weight.t()."""
    return _of_left(gradient, x, weight.t())


def _matrix_gradient(gradient: Tensor, x: Tensor, matrix: Tensor) -> Tensor:
    """The gradient of the matrix in x @ matrix."""
    if _by_columns(matrix):
        return _rows(gradient).t().mm(_rows(x)).t()
    return _rows(x).t().mm(_rows(gradient))


def _transposed_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """The gradient of the weight in x @ weight.t()."""
    return _matrix_gradient(gradient, x, weight.t()).t()


def _nothing(*_: Tensor) -> None:
    """Numbers have no gradient."""


_LINEAR = ProductRule(F.linear, _of_input, _transposed_gradient)
MATMUL = ProductRule(lambda x, factor, _: torch.matmul(x, factor), _of_left, _matrix_gradient)
"""x @ weight: x [..., in], at least two dims, weight [in, out]."""
ADDMM = ProductRule(lambda x, factor, bias: torch.addmm(bias, x, factor), _of_left, _matrix_gradient)
"""`torch.addmm`: x [n, in], weight [in, out], bias [out] or [n, out]."""
BMM = ProductRule(
    lambda x, factor, _: torch.bmm(x, factor),
    lambda gradient, x, factor: gradient.bmm(factor.transpose(1, 2)),
    lambda gradient, x, factor: x.transpose(1, 2).bmm(gradient),
)
"""`torch.bmm`: x [e, n, in], weight [e, in, out]: [e, n, out]."""
_GROUPED = ProductRule(
    lambda rows, factor, _, ends: F.grouped_mm(rows, factor, offs=ends),
    lambda gradient, rows, factor, ends: F.grouped_mm(gradient, factor.transpose(1, 2), offs=ends),
    lambda gradient, rows, factor, ends: _of_groups(gradient, rows, factor, ends),
)


def _of_groups(gradient: Tensor, rows: Tensor, factor: Tensor, ends: Tensor) -> Tensor:
    if factor.stride(1) == 1:  # column by column, as weights [groups, out, in] are when they are transposed
        return F.grouped_mm(gradient.t(), rows, offs=ends).transpose(1, 2)
    return F.grouped_mm(rows.t(), gradient, offs=ends)
