"""Where a matrix meets an activation: every product with one, and the embedding's rows, of ppctl's own models.

Must not know layers, names, ranks or weights' values. Outside this file no module of `model/` reads a matrix
(tests/torch/model/test_linear.py), so that another number format or another moment for weight gradients changes
`product` and `grouped_product`, and an exchange between ranks beside a product changes the classes. Which dimension
of a weight an axis splits is in its row (`geometry/parameters.py`): it is no argument here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.model.fp8 import BLOCK, Fp8, Quantised
from ppctl.weight_gradients.products import embedding, grouped_mm, linear
from ppctl.weight_gradients.put_off import Rule, multiply, putting_off

Product = Callable[..., Tensor]
"""(activations, weights) -> activations: what `for_each_group` passes to its block, for one group or for all."""


def make_weight(*shape: int) -> nn.Parameter:
    """A weight of this shape without values, which `initialize` fills.

    Torch's own modules draw values even on the meta device, for which an embedding imports torch's compiler: a second
    of every rank's start.
    """
    return nn.Parameter(torch.empty(shape))


@dataclass(frozen=True, slots=True)
class Rounded:
    """An activation [..., in] in 8 bits, for several products with it; `x` is what gets the gradient."""

    x: Tensor
    quantised: Quantised


Operand = Tensor | Rounded


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times the transpose of weight [out, in], plus bias [out]: [..., out]. The weight may be a view."""
    later = putting_off(weight)
    return F.linear(x, weight, bias) if later is None else linear(later, x, weight, bias)


def rounded(x: Operand, fp8: Fp8) -> Rounded:
    """`x` in 8 bits, once for all products that are given the result."""
    return x if isinstance(x, Rounded) else Rounded(x, fp8.activation(x.flatten(0, -2)))


def product_in_fp8(x: Operand, weight: Tensor, fp8: Fp8) -> Tensor:
    """The same in 8 bits, in the dtype of `x`; so are both products of the backward.

    Kept for the backward are `x` in 8 bits, with its scales, and the weight as it is. The weight's gradient sums over
    tokens, for which `x` is scaled and rounded a second time, from its 8 bits.
    """
    x = rounded(x, fp8)
    q = x.quantised
    kind = _InFp8(q.tile, q.shape, x.x.dtype, fp8)
    later = putting_off(weight)
    if later is None:
        whole = _ProductInFp8.apply
        out: Tensor = whole(x.x, weight, q.values, q.scales, kind)  # type: ignore[no-untyped-call]  # torch's own
        return out
    rule = Rule(
        lambda of, factor, _, values, scales: kind.multiply(of, factor, values, scales),
        lambda gradient, _, factor, values, scales: kind.of_input(gradient, factor),
        lambda gradient, _, form, values, scales: kind.of_weight(gradient, values, scales),
        keeps_input=False,
    )
    return multiply(later, rule, weight, x.x, q.values, q.scales)


class _InFp8(NamedTuple):
    """A product in 8 bits, of an activation [..., in] whose rounded matrix has this tile and shape."""

    tile: tuple[int, int]
    matrix: tuple[int, int]
    dtype: torch.dtype
    fp8: Fp8

    def multiply(self, x: Tensor, weight: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        """The product [..., out], in the dtype of x."""
        quantised = Quantised(values, scales, self.tile, self.matrix)
        out = self.fp8.multiply(quantised, self.fp8.weight(weight)).to(self.dtype)
        return out.reshape(*x.shape[:-1], len(weight))

    def of_input(self, gradient: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the activation."""
        of_x = self.fp8.multiply(self.fp8.gradient(gradient.flatten(0, -2)), self.fp8.weight(weight.t()))
        return of_x.to(gradient.dtype).reshape(*gradient.shape[:-1], weight.shape[1])

    def of_weight(self, gradient: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        """The gradient of the weight [out, in], in the dtype of the product, which is the weight's."""
        x = Quantised(values, scales, self.tile, self.matrix).dequantised()
        of_weight = self.fp8.multiply(self.fp8.gradient(gradient.flatten(0, -2).t()), self.fp8.activation(x.t()))
        return of_weight.to(self.dtype)


class _ProductInFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, values: Tensor, scales: Tensor, kind: _InFp8) -> Tensor:
        ctx.save_for_backward(values, scales, weight)
        ctx.kind = kind
        return kind.multiply(x, weight, values, scales)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        values, scales, weight = ctx.saved_tensors
        (gradient,), kind = gradients, ctx.kind
        of_x = kind.of_input(gradient, weight)
        return of_x, kind.of_weight(gradient, values, scales).to(weight.dtype), None, None, None


def multiply_in_float32(a: Quantised, b: Quantised) -> Tensor:
    """`Multiply` on any device, float32: the 8-bit numbers times their scales, multiplied in float32."""
    return F.linear(a.dequantised(), b.dequantised())


def multiply_scaled(a: Quantised, b: Quantised) -> Tensor:
    """`Multiply` by CUDA's 8-bit products, bfloat16: sums in float32, without Hopper's short accumulators."""
    scales_a, kind_a = _scales(a)
    scales_b, kind_b = _scales(b)
    out = F.scaled_mm(
        a.values,
        b.values.t(),
        scales_a,
        kind_a,
        # A scale for each of b's rows goes beside its columns, as b does itself.
        scales_b.t() if kind_b is F.ScalingType.RowWise else scales_b,
        kind_b,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return out.narrow(0, 0, a.shape[0]).narrow(1, 0, b.shape[0])


def _scales(matrix: Quantised) -> tuple[Tensor, F.ScalingType]:
    """Scales in the layout that scaled_mm wants, and their kind."""
    scales = matrix.scales
    if matrix.tile == (1, BLOCK):
        by_column = scales.t().clone(memory_format=torch.contiguous_format).t()
        return by_column, F.ScalingType.BlockWise1x128
    if matrix.tile == (BLOCK, BLOCK):
        # [k / 128 filled up to whole fours, n / 128], column by column.
        return F.pad(scales, (0, -scales.shape[1] % 4)).t(), F.ScalingType.BlockWise128x128
    return scales, F.ScalingType.RowWise


def product_in_float32(x: Tensor, weight: Tensor) -> Tensor:
    """The same in float32, whatever the dtypes of `x` and `weight` are and under autocast as well.

    Kept for the backward are `x` and `weight` as they are, and not their copies in float32.
    """
    out: Tensor = _ProductInFloat32.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own
    return out


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A context in which no product is cast, on a kind of device; on some (`meta`) none ever is."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _ProductInFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        with without_autocast(x.device.type):
            return product(x.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        with without_autocast(x.device.type):
            of_x = product(gradient, weight.float().t())
            of_weight = product(gradient.flatten(0, -2).t(), x.float().flatten(0, -2).t())
        return of_x.to(x.dtype), of_weight.to(weight.dtype)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [n, in] times the transposes of weights [groups, out, in], in one kernel: [n, out].

    Group g's rows end before `ends[g]` (int32, on the device of `rows`), so that the host need not know the counts.
    """
    later, factor = putting_off(weights), weights.transpose(1, 2)
    out = F.grouped_mm(rows, factor, offs=ends) if later is None else grouped_mm(later, rows, factor, ends)
    if out.requires_grad:
        out.register_hook(_row_by_row)
    return out


def _row_by_row(matrix: Tensor) -> Tensor:
    """`matrix` with its rows one after another, as grouped_mm demands of the gradient that comes to its backward.

    Not `contiguous`: a single row is that whatever its strides are, and grouped_mm looks at these.
    """
    in_place = matrix.stride() == (matrix.shape[1], 1)
    return matrix if in_place else matrix.clone(memory_format=torch.contiguous_format)


def for_each_group(
    block: Callable[..., Tensor],
    rows: Tensor,
    counts: Tensor,
    *stacks: Tensor,
    at_once: bool = False,
    fp8: Fp8 | None = None,
) -> Tensor:
    """`block(product, rows, *weights)` where each group of rows meets its own matrix of every stack.

    `rows` [n, in] are sorted by group, `counts` [groups] (int64) says how many each group has, a stack is [groups, out,
    in], and the block may treat each row for itself only. `at_once` runs the block once, over all rows, by a kernel
    that most devices lack; else it runs once for each group, and not product by product: torch's elementwise functions
    on the CPU give other bits at the end of a tensor than inside it, and so a group's results would depend on the
    groups beside it. With `fp8` the products are in 8 bits, of rows that are `rounded` once.
    """
    if at_once and len(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        return block(partial(grouped_product, ends=ends), rows, *stacks)
    sizes = counts.tolist() if len(rows) else [0] * len(counts)  # the device is waited for where that says something
    parts = zip(rows.split(sizes), *(stack.unbind() for stack in stacks), strict=True)
    if fp8 is not None:
        multiply = partial(product_in_fp8, fp8=fp8)
        return torch.cat([block(multiply, rounded(part, fp8), *weights) for part, *weights in parts])
    return torch.cat([block(product, *part) for part in parts])


class Linear(nn.Module):
    """A projection [..., in] -> [..., out]: `weight` [out, in] and, where asked for, `bias` [out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, fp8: Fp8 | None = None) -> None:
        super().__init__()
        self.fp8 = fp8
        self.weight = make_weight(out_features, in_features)
        self.bias = make_weight(out_features) if bias else None

    def forward(self, x: Operand) -> Tensor:
        """Project the last dimension."""
        if self.fp8 is None:
            assert isinstance(x, Tensor)
            return product(x, self.weight, self.bias)
        out = product_in_fp8(x, self.weight, self.fp8)
        return out if self.bias is None else out + self.bias

    def operand(self, x: Tensor) -> Operand:
        """`x` for this projection and others: where these are in 8 bits, it is rounded and kept once for all."""
        return x if self.fp8 is None else rounded(x, self.fp8)


class Embedding(nn.Module):
    """A row [h] of `weight` [vocab_size, h] for each token id."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = make_weight(vocab_size, hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] (int64) -> [b, s, h]."""
        later = putting_off(self.weight)
        return F.embedding(tokens, self.weight) if later is None else embedding(later, tokens, self.weight)
