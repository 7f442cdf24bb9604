"""Every product of an activation with a weight, and the embedding lookup, in ppctl's own models.

Must not know layers, names, ranks or weights' values. Outside this file no module of `model/` reads a matrix
(tests/torch/model/test_linear.py): another number format, or another moment for weight gradients, changes only
`product` and `grouped_product`; an exchange between ranks beside a product changes only the classes. Which dimension
of a weight an axis splits is in the weight's row (`geometry/parameters.py`): it is no argument here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.geometry.rows import Place
from ppctl.model.fp8 import BLOCK, Fp8, Operand, Quantised
from ppctl.model.grouped_fp8 import Groups, GroupsInFp8, copies_of
from ppctl.model.split import ALONE, TensorSplit, leave
from ppctl.model.split import columns as split_columns
from ppctl.tensors.row_copies import copied, summed
from ppctl.tensors.wide_dtype import wide_dtype
from ppctl.weight_gradients.deferred import DeferredGradients, ProductRule, deferring, multiply
from ppctl.weight_gradients.products import embedding, grouped_mm, linear
from ppctl.weight_gradients.wide_sums import AtOnce, add_gradient, sum_of

Product = Callable[..., Tensor]
"""(activations, weights) -> activations: what `for_each_group` passes to its block, for one group or for all."""


def make_weight(*shape: int) -> nn.Parameter:
    """A weight of this shape without values, which `initialize` fills.

    Torch's own modules draw values even on the meta device, where an embedding imports torch's compiler for it: a
    second of every rank's start.
    """
    return nn.Parameter(torch.empty(shape))


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times the transpose of weight [out, in], plus bias [out]: [..., out]. The weight may be a view."""
    later: DeferredGradients | AtOnce | None = deferring(weight)
    if later is None and sum_of(weight) is not None and torch.is_grad_enabled():
        later = AtOnce()
    return F.linear(x, weight, bias) if later is None else linear(later, x, weight, bias)


def product_in_fp8(x: Operand, weight: Tensor, fp8: Fp8) -> Tensor:
    """`product` in 8 bits, with a result in the dtype of `x`. Both products of the backward are in 8 bits, too.

    Saved for the backward are `x` in 8 bits, with its scales, and the weight as it is. The weight's gradient sums over
    tokens, for which `x` is scaled and rounded a second time, from its values in 8 bits.
    """
    rounded, *kept = fp8.rounded(x).parts
    return _by_rule(_rule(fp8), weight, rounded, *kept)


def _by_rule(rule: ProductRule, weight: Tensor, x: Tensor, *kept: Tensor) -> Tensor:
    """The product of x and the weight by `rule`, whose gradients need `kept` beside the weight."""
    later = deferring(weight)
    if later is not None:
        return multiply(later, rule, weight, x, *kept)
    out: Tensor = _WholeProduct.apply(x, weight, rule, *kept)  # type: ignore[no-untyped-call]  # torch's own
    return out


def _rule(fp8: Fp8) -> ProductRule:
    """The rule for products in 8 bits of an activation, given with its rounded values and scales, and a weight."""

    def multiplied(x: Tensor, weight: Tensor, _: None, values: Tensor, scales: Tensor) -> Tensor:
        rounded = fp8.activation_of(values, scales, (x.shape[:-1].numel(), x.shape[-1]))
        out = fp8.multiply(rounded, fp8.weight(weight)).to(x.dtype)
        # No view, as torch's own products: autograd refuses a sum in the memory of a view from a function (`leave`).
        whole: Tensor = torch.ops.aten._unsafe_view(out, [*x.shape[:-1], len(weight)])
        return whole

    def of_input(gradient: Tensor, _: None, weight: Tensor, *__: Tensor) -> Tensor:
        of_x = fp8.multiply(fp8.gradient(gradient.flatten(0, -2)), fp8.weight(weight.t()))
        return of_x.to(gradient.dtype).reshape(*gradient.shape[:-1], weight.shape[1])

    def of_weight(gradient: Tensor, _: None, weight: Tensor, values: Tensor, scales: Tensor) -> Tensor:
        rows = gradient.flatten(0, -2)
        x = fp8.activation_of(values, scales, (len(rows), weight.shape[1])).dequantised()
        return fp8.multiply(fp8.gradient(rows.t()), fp8.activation(x.t())).to(gradient.dtype)

    return ProductRule(multiplied, of_input, of_weight, keeps_input=False)


class _WholeProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rule: ProductRule, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(weight, *kept)
        ctx.rule = rule
        return rule.multiply(x, weight, None, *kept)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (weight, *kept), (gradient,), rule = ctx.saved_tensors, gradients, ctx.rule
        of_x = rule.of_input(gradient, None, weight, *kept)
        return of_x, rule.of_factor(gradient, None, weight, *kept).to(weight.dtype), None, *(None for _ in kept)


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
        # Scales of b's rows are transposed with b.
        scales_b.t() if kind_b is F.ScalingType.RowWise else scales_b,
        kind_b,
        output_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return out.narrow(0, 0, a.shape[0]).narrow(1, 0, b.shape[0])


def multiply_groups_scaled(a: Tensor, of_a: Tensor, b: Tensor, of_b: Tensor, ends: Tensor) -> Tensor:
    """`MultiplyGroups` by CUDA's scaled grouped product, with sums in float32 as `multiply_scaled` has them.

    Torch's public name for it runs the same kernel, but not on tensors without values.
    """
    return torch._scaled_grouped_mm(a, b.mT, of_a, of_b, offs=ends, out_dtype=torch.bfloat16)


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


def product_in_float32(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(`product` in float32, x): float64 numbers stay float64, and autocast changes nothing. Whoever reads x next must
    read the returned x. To its gradient, which nobody else may hold, the backward adds this product's in place.

    Saved for the backward are `x` and `weight` as they are. Products of bfloat16 numbers are exact in float32, in which
    they are summed: a GPU reads the numbers as they are. In the backward it reads the gradient as the sum of two
    bfloat16 numbers (16 of 24 bits; the results have 8). The CPU has no such product, and makes copies in float32.
    """
    out: tuple[Tensor, Tensor] = _ProductInFloat32.apply(x, weight)  # type: ignore[no-untyped-call]  # torch's own
    return out


def without_autocast(kind: str) -> AbstractContextManager[object]:
    """A context in which no product is cast, on a kind of device; on some (`meta`) none ever is."""
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


class _ProductInFloat32(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        wide = wide_dtype(x.dtype)
        with without_autocast(x.device.type):
            if _read_as_they_are(x, weight):
                out = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=wide).view(*x.shape[:-1], -1)
            else:
                out = product(x.to(wide), weight.to(wide))
        return out, x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient, of_x), (x, weight) = gradients, ctx.saved_tensors
        with without_autocast(x.device.type):
            if _read_as_they_are(x, weight):
                parts, wide = in_two(gradient.flatten(0, -2), x.dtype), gradient.dtype
                of_parts = torch.mm(parts.t(), x.flatten(0, -2), out_dtype=wide)
                of_weight = torch.add(*of_parts.chunk(2), out=torch.empty_like(weight))
                return _add_of_input(of_x, parts, torch.cat((weight, weight))), of_weight
            own = product(gradient, weight.to(gradient.dtype).t())
            of_weight = product(gradient.flatten(0, -2).t(), x.to(gradient.dtype).flatten(0, -2).t())
        return own.to(x.dtype) + of_x, of_weight.to(weight.dtype)


def _read_as_they_are(x: Tensor, weight: Tensor) -> bool:
    return x.device.type != "cpu" and x.dtype == weight.dtype == torch.bfloat16


def in_two(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, 2 x m]: a matrix [n, m] rounded to a narrower dtype, and beside it the rest, rounded as well."""
    parts = matrix.new_empty(len(matrix), 2, matrix.shape[1], dtype=dtype)
    high, low = parts.unbind(1)
    torch.sub(matrix, high.copy_(matrix), out=low)
    return parts.flatten(1)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """rows [n, in] times the transposes of weights [groups, out, in], in one kernel: [n, out].

    Group g's rows end before `ends[g]` (int32, on the device of `rows`), so that the host need not know the counts.
    """
    later, factor = deferring(weights), weights.transpose(1, 2)
    out = F.grouped_mm(rows, factor, offs=ends) if later is None else grouped_mm(later, rows, factor, ends)
    if out.requires_grad:
        out.register_hook(_row_by_row)
    return out


def _row_by_row(matrix: Tensor) -> Tensor:
    """`matrix` with its rows one after another, as grouped_mm demands of the gradient that comes to its backward.

    Not by `contiguous()`: a single row is contiguous whatever its strides are, but grouped_mm looks at the strides.
    """
    in_place = matrix.stride() == (matrix.shape[1], 1)
    return matrix if in_place else matrix.clone(memory_format=torch.contiguous_format)


def for_each_group(
    block: Callable[..., Tensor],
    rows: Tensor,
    counts: Tensor,
    *stacks: Tensor,
    beside: Tensor,
    at_once: bool = False,
    grouped: Product | None = None,
    fp8: Fp8 | None = None,
) -> Tensor:
    """`block(product, rows, beside, *weights)` where each group of rows meets its own matrix of every stack.

    `rows` [n, in] are sorted by group, `counts` [groups] (int64) says how many each group has, a stack is [groups, out,
    in], `beside` [n, ...] goes with the rows, and the block must treat each row by itself. `at_once` runs the block
    once, over all rows, by a kernel that most devices lack (`grouped_product`, or another `grouped`). Otherwise the
    whole block runs once for each group: torch's elementwise functions on the CPU give other bits at the end of a
    tensor than inside it, so in one tensor a group's results would depend on the groups beside it. With `fp8` the
    products are in 8 bits, of rows that are `rounded` once.
    """
    if at_once and fp8 is not None:
        groups = Groups.of(counts, len(rows))
        product_of_all = partial(_grouped_in_fp8, groups=groups, fp8=fp8)
        done = block(product_of_all, fp8.rounded(summed(rows, groups)), summed(beside, groups), *stacks)
        return copied(done, groups)
    if at_once and len(rows):
        ends = counts.cumsum(0, dtype=torch.int32)
        return block(partial(grouped or grouped_product, ends=ends), rows, beside, *stacks)
    sizes = (
        counts.tolist() if len(rows) else [0] * len(counts)
    )  # the device is waited for only if the counts are needed
    parts = zip(rows.split(sizes), beside.split(sizes), *(stack.unbind() for stack in stacks), strict=True)
    if fp8 is not None:
        multiply = partial(product_in_fp8, fp8=fp8)
        return torch.cat([block(multiply, fp8.rounded(part), *more) for part, *more in parts])
    return torch.cat([block(product, *part) for part in parts])


def _grouped_in_fp8(rows: Operand, weights: Tensor, groups: Groups, fp8: Fp8) -> Tensor:
    kind = GroupsInFp8(fp8, copies_of(weights, fp8))
    rule = ProductRule(kind.multiply, kind.of_input, kind.of_weight, keeps_input=False)
    return _by_rule(rule, weights, *fp8.rounded(rows).parts, *groups)


def _of_weight(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    total = sum_of(weight)  # None for a weight that came through hooks (recomputation)
    if total is None:
        return gradient.flatten(0, -2).t() @ x.flatten(0, -2)
    add_gradient(total, gradient, x, weight)
    return None


def _add_of_input(total: Tensor, gradient: Tensor, weight: Tensor) -> Tensor:
    """`total` plus the gradient of x in x @ weight.t(), in the memory of `total`; on a GPU in bfloat16 rounded once."""
    if total.device.type == "cpu" or total.dtype != torch.bfloat16:
        return total.add_(F.linear(gradient, weight.t()))
    rows = total.reshape(-1, total.shape[-1])
    return torch.addmm(rows, gradient.flatten(0, -2), weight, out=rows).view_as(total)


_PLAIN = ProductRule(
    lambda x, weight, _: F.linear(x, weight),
    lambda gradient, _, weight: F.linear(gradient, weight.t()),
    _of_weight,
    add_of_input=_add_of_input,
)


def makes_sums(*projections: Linear | Projection) -> bool:
    """Whether these projections' products add up gradients themselves: of each weight, and of x over the products."""
    plain = all(each.fp8 is None and each.bias is None and sum_of(each.weight) is not None for each in projections)
    return plain and torch.is_grad_enabled()


class Projection(NamedTuple):
    """Some outputs of a `Linear`, as views of its weight [out, in] and bias [out]."""

    weight: Tensor
    bias: Tensor | None
    fp8: Fp8 | None


class Linear(nn.Module):
    """A projection [..., in] -> [..., out]: `weight` [out, in] and, if asked for, `bias` [out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, fp8: Fp8 | None = None) -> None:
        super().__init__()
        self.fp8 = fp8
        self.weight = make_weight(out_features, in_features)
        self.bias = make_weight(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Project the last dimension."""
        return _project(x, self, self.bias)

    def outputs(self, own: slice) -> Projection:
        """The projection to the outputs `own` alone; its weight and bias are views."""
        return Projection(self.weight[own], None if self.bias is None else self.bias[own], self.fp8)


def columns(x: Tensor, *projections: Linear | Projection, split: TensorSplit | None = None) -> tuple[Tensor, ...]:
    """x through each of the projections; if these are split, every rank makes its own columns, of all tokens.

    What several products need of x is made once: its rounding to 8 bits, or the gather of all ranks' tokens.
    """
    if split is None and len(projections) > 1 and makes_sums(*projections):
        # Gradients of x are added up from the last projection to the first, as by autograd.
        last_first = split_columns(ALONE, _PLAIN, lambda x: (x,), x, [each.weight for each in reversed(projections)])
        return last_first[::-1]
    if split is None:
        fp8 = projections[0].fp8
        shared: Operand = x if fp8 is None else fp8.rounded(x)
        return tuple(_project(shared, each, each.bias) for each in projections)
    weights = [each.weight for each in projections]
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x, weights = x.to(dtype), [weight.to(dtype) for weight in weights]
    fp8 = projections[0].fp8
    rule = _PLAIN if fp8 is None else _rule(fp8)
    outputs = split_columns(split, rule, lambda x: (x,) if fp8 is None else fp8.rounded(x).parts, x, weights)
    return tuple(_with_bias(out, each) for out, each in zip(outputs, projections, strict=True))


def from_columns(x: Tensor, projection: Linear, split: TensorSplit | None = None) -> Tensor:
    """x through the projection; if it is split, x has a rank's own columns, and the ranks' products are summed."""
    if split is None:
        return _project(x, projection, projection.bias)
    return _with_bias(leave(_project(x, projection, None), split), projection)


def _with_bias(out: Tensor, projection: Linear | Projection) -> Tensor:
    """A split product plus its bias, in the product's dtype: autocast casts a whole product's bias, too."""
    return out if projection.bias is None else out + projection.bias.to(out.dtype)


def _project(x: Operand, projection: Linear | Projection, bias: Tensor | None) -> Tensor:
    if projection.fp8 is None:
        assert isinstance(x, Tensor)
        return product(x, projection.weight, bias)
    out = product_in_fp8(x, projection.weight, projection.fp8)
    return out if bias is None else out + bias


class Embedding(nn.Module):
    """A row [h] of `weight` [vocab_size, h] for each token id; if it is split, a rank holds neighbouring rows."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.weight = make_weight(vocab_size, hidden_size)
        self.split: TensorSplit | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids [b, s] (int64) -> [b, s, h], or of the rank's own tokens [b, s / tp, h]."""
        if self.split is None:
            return self._look_up(tokens)
        held = own_words(self.vocab_size, self.split)
        elsewhere = (tokens < held.start) | (tokens >= held.stop)
        rows = self._look_up((tokens - held.start).masked_fill(elsewhere, 0))
        return leave(rows.masked_fill(elsewhere[..., None], 0.0), self.split)

    def _look_up(self, tokens: Tensor) -> Tensor:
        later = deferring(self.weight)
        return F.embedding(tokens, self.weight) if later is None else embedding(later, tokens, self.weight)


def own_words(vocab_size: int, split: TensorSplit) -> range:
    """The token ids whose rows of the embedding, and of the output, a rank holds."""
    return Place(split.rank, split.size).run(vocab_size)
