"""Feed-forward blocks [b, s, h] -> [b, s, h]: a dense one, and a mixture of experts, which drops no token.

If several ranks hold the experts, an `ExchangeRows` is put in (`parallel/`). Attribute names are canonical parameter
names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.geometry.expert_reach import expert_runs
from ppctl.model.activation import activation
from ppctl.model.fp8 import Operand
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.linear import Linear, Product, columns, for_each_group, from_columns, make_weight
from ppctl.model.router import Router
from ppctl.model.split import TensorSplit
from ppctl.tensors.row_copies import RowCopies, copied, reorder, summed

ExchangeRows = Callable[[Tensor, Tensor, Tensor, Tensor, Callable[[Tensor, Tensor, Tensor], Tensor]], Tensor]
"""`exchange(rows, chosen, weights, counts, experts)`: bring each of the rows [t, h] to where its experts live (`chosen`
[t, K], ascending); apply `experts(rows by expert, their weights [n, 1], counts of the experts there)`; and return for
each row the sum [t, h] over its experts, in the order of `ExpertRuns`. `counts` [E] says how many rows each expert
has."""


class FeedForward(nn.Module):
    """SwiGLU [b, s, h] -> [b, s, h], w2(silu(w1 x) * w3 x); without a gate w2(gelu(w1 x))."""

    def __init__(self, model: ModelConfig, width: int, kernels: Kernels = ON_CPU) -> None:
        super().__init__()
        h, bias = model.hidden_size, model.add_bias_linear
        self.w1 = Linear(h, width, bias=bias, fp8=kernels.fp8)
        self.w2 = Linear(width, h, bias=bias, fp8=kernels.fp8)
        self.w3 = Linear(h, width, bias=bias, fp8=kernels.fp8) if model.gated_linear_unit else None
        self.fused = kernels.fuses_swiglu
        self.split: TensorSplit | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to every position."""
        factors = (self.w1,) if self.w3 is None else (self.w1, self.w3)
        return from_columns(activation(*columns(x, *factors, split=self.split), fused=self.fused), self.w2, self.split)


class Experts(nn.Module):
    """Routed experts, or a stage's part of them: feed-forwards without biases; weights stacked, [experts, out, in]."""

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__()
        self.kernels = kernels
        outside = kernels.outside.get("grouped_product")
        self.grouped: Product | None = None if outside is None else outside.function
        """A grouped product that is not ppctl's."""
        count, h, width = model.num_moe_experts or 0, model.hidden_size, model.expert_width
        self.w1 = make_weight(count, width, h)
        self.w2 = make_weight(count, h, width)
        self.w3 = make_weight(count, width, h) if model.gated_linear_unit else None

    def forward(self, rows: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Send each of the rows [n, h], which are sorted by expert, through its expert; times its weight [n, 1].

        `counts` [experts] says how many rows each expert has.
        """
        up = () if self.w3 is None else (self.w3,)
        stacks, at_once, fp8 = (self.w1, self.w2, *up), self.kernels.groups_experts, self.kernels.fp8
        return for_each_group(
            self.transform, rows, counts, *stacks, beside=weights, at_once=at_once, grouped=self.grouped, fp8=fp8
        )

    def transform(
        self, product: Product, rows: Operand, weights: Tensor, w1: Tensor, w2: Tensor, *w3: Tensor
    ) -> Tensor:
        """The feed-forward of rows [n, h]; `product` suits the matrices, which are one expert's or the stacks.

        A row's weight multiplies the input of the last product, which has no bias: so the weight's gradient does not
        need the experts' results (Megatron-core does the same).
        """
        return product(self.activate(weights, product(rows, w1), *(product(rows, up) for up in w3)), w2)

    def activate(self, weights: Tensor, x: Tensor, *up: Tensor) -> Tensor:
        """The input [n, width] of the last product. Recomputation may make it a second time."""
        return activation(x, *up, weights=weights, fused=self.kernels.fuses_swiglu)


class MixtureOfExperts(nn.Module):
    """A router, K of E routed experts a token, and shared experts. The backward covers the auxiliary losses, too."""

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__()
        self.router = Router(model, fused=kernels.fuses_swiglu)
        self.experts = Experts(model, kernels)
        shared = model.moe_shared_expert_intermediate_size
        self.shared_experts = FeedForward(model, shared, kernels) if shared else None
        self.runs = expert_runs(model)
        self.exchange: ExchangeRows = self._here

    def forward(self, x: Tensor) -> Tensor:
        """Send every token through its experts."""
        routing = self.router(x)
        x = routing.x
        chosen, slots = routing.experts.flatten(0, 1).sort(-1)
        weights = routing.weights.flatten(0, 1).gather(-1, slots).to(x.dtype)
        out = self.exchange(x.flatten(0, 1), chosen, weights, routing.counts, self.experts).view(x.shape)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        if routing.auxiliary is not None:
            scale = self.router.ledger.scale
            out = _Attach.apply(out, routing.auxiliary, scale)  # type: ignore[no-untyped-call]  # torch's own
        return out

    def _here(self, rows: Tensor, chosen: Tensor, weights: Tensor, counts: Tensor, experts: Any) -> Tensor:
        copies, order = RowCopies.of(chosen, self.runs.size, self.runs.most)
        weighed = reorder(weights.reshape(-1, 1), order, copies.places)
        return summed(experts(copied(rows, copies), weighed, counts), copies)


class _Attach(torch.autograd.Function):
    """The output as it is; its backward also sends `scale` into the auxiliary loss, as if it were in the objective."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, auxiliary: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(auxiliary)
        ctx.scale = scale
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (auxiliary,) = ctx.saved_tensors
        return gradients[0], torch.full_like(auxiliary, ctx.scale), None
