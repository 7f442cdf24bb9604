"""Mixture of experts, [b, s, h] -> [b, s, h]: shared experts for every token, K of E routed ones, none ever dropped.

Knows how tokens are sorted by expert and summed again, always in the same order: no sum here is left to atomics or to
the order of threads. Must not know ranks: where experts live on several, an `Exchange` is put in (`parallel/`).
Attribute names are canonical parameter names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.model.feed_forward import FeedForward
from ppctl.model.linear import Product, for_each_group, make_weight
from ppctl.model.router import Router

Exchange = Callable[[Tensor, Tensor, Callable[[Tensor, Tensor], Tensor]], Tensor]
"""`exchange(rows, counts, experts)`: bring rows [n, h], sorted by expert with counts [E], to where their experts live,
apply `experts(rows, counts of the experts there)`, and bring the results back into the order of `rows`."""


class Share(NamedTuple):
    """Which part of the routed experts is held: the `rank`-th of `size` equal runs of neighbours."""

    rank: int = 0
    size: int = 1

    def experts(self, model: ModelConfig) -> range:
        """The experts of this share."""
        count = (model.num_moe_experts or 0) // self.size
        return range(self.rank * count, (self.rank + 1) * count)


WHOLE = Share()


class Experts(nn.Module):
    """The routed experts of a share, each a SwiGLU; weights stacked, [experts held, out, in]."""

    def __init__(self, model: ModelConfig, share: Share) -> None:
        super().__init__()
        self.held = share.experts(model)
        count, h, width = len(self.held), model.hidden_size, model.moe_ffn_hidden_size or model.ffn_hidden_size
        self.w1 = make_weight(count, width, h)
        self.w2 = make_weight(count, h, width)
        self.w3 = make_weight(count, width, h)

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Apply to rows [n, h] sorted by expert the expert of each; `counts` [experts held] says how many each has."""
        return for_each_group(self.transform, rows, counts, self.w1, self.w2, self.w3)

    def transform(self, product: Product, rows: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
        """The SwiGLU of rows [n, h], by the product that suits the weights: those of one expert, or the stacks."""
        return product(self.activate(product(rows, w1), product(rows, w3)), w2)

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """What goes into the last product: silu(gate) * up, of any shape. Recomputation may make it a second time."""
        return F.silu(gate) * up


class MixtureOfExperts(nn.Module):
    """Router, routed experts and shared ones. Auxiliary losses ride on the output, and their gradients on its own."""

    def __init__(self, model: ModelConfig, share: Share = WHOLE) -> None:
        super().__init__()
        self.router = Router(model)
        self.experts = Experts(model, share)
        shared = model.moe_shared_expert_intermediate_size
        self.shared_experts = FeedForward(model.hidden_size, shared) if shared else None
        self.exchange: Exchange | None = None
        """Needed where the share is not the whole."""

    def forward(self, x: Tensor) -> Tensor:
        """Send every token through its experts."""
        routing = self.router(x)
        chosen, topk = routing.experts.flatten(), routing.experts.shape[-1]
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=self.router.num_experts)
        rows: Tensor = _Spread.apply(x.flatten(0, 1), order, topk)  # type: ignore[no-untyped-call]
        rows = self.experts(rows, counts) if self.exchange is None else self.exchange(rows, counts, self.experts)
        slots = rows.index_select(0, order.argsort()).view(*x.shape[:2], topk, -1)
        out: Tensor = (slots * routing.weights.to(x.dtype)[..., None]).sum(-2)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        if routing.auxiliary is not None:
            scale = self.router.ledger.scale
            out = _Attach.apply(out, routing.auxiliary, scale)  # type: ignore[no-untyped-call]
        return out


class _Spread(torch.autograd.Function):
    """Rows [n x K, h] of tokens [n, h], each token K times, in `order`; the K gradients are summed slot by slot."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, topk: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.topk = topk
        return tokens.index_select(0, order // topk)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return gradients[0].index_select(0, order.argsort()).unflatten(0, (-1, ctx.topk)).sum(1), None, None


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
