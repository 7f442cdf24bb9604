"""Sums of a weight's gradients, wider than the weight: gradients are added to them, or whole products (decision 84)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class WideSum(NamedTuple):
    """The sum of one parameter's gradients, in float32."""

    total: Callable[[], Tensor | None]
    """A function that returns the sum so far; None before the first gradient of a step."""
    begin: Callable[[Tensor | None], None]
    """A function that sets the sum to a tensor; None means that there is no gradient yet."""

    def add(self, gradient: Tensor) -> None:
        """Add a gradient; one in the sum's dtype keeps what bfloat16 would round away."""
        total = self.total()
        if total is None:
            self.begin(gradient.float())
        else:
            total.add_(gradient)

    def add_product(self, a: Tensor, b: Tensor) -> None:
        """Add a @ b of 16-bit matrices; the product's own sums are in float32, too."""
        total = self.total()
        if total is None:
            self.begin(torch.mm(a, b, out_dtype=torch.float32))
        else:
            add_product(total, a, b)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total [n, m] float32 += a [n, k] @ b [k, m], both in 16 bits, in one kernel, which reads and writes `total`."""
    torch.addmm(total, a, b, out_dtype=torch.float32, out=total)


def adds_products(device: torch.device) -> bool:
    """Whether this device and torch have `add_product`, tried on small matrices."""
    total = torch.ones(16, 16, device=device)
    a = torch.full((16, 16), 1 + 2**-7, dtype=torch.bfloat16, device=device)
    try:
        add_product(total, a, a)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 1 + 16 * (1 + 2**-7) ** 2).all())


def sum_of(weight: Tensor) -> WideSum | None:
    """The sum to which products add the gradient of this weight themselves (the parameter's attribute `wide_sum`); None
    if autograd accumulates it, as for any view."""
    found: WideSum | None = getattr(weight, "wide_sum", None)
    return found if weight.requires_grad else None


class AtOnce:
    """Stands in for a collector (`DeferredGradients`) in whole backwards: gradients are made immediately."""

    def place(self, weight: Tensor, *, cast: bool) -> Tensor:
        """The weight."""
        return weight

    def put(self, weight: Tensor, place: Tensor, make: Callable[[], object]) -> None:
        """Call `make`."""
        make()


def add_gradient(total: WideSum, gradient: Tensor, x: Tensor, weight: Tensor) -> None:
    """Add the gradient of the weight in x @ weight.t() to its sum."""
    total.add_product(gradient.flatten(0, -2).t(), x.flatten(0, -2))
