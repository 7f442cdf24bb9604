"""The activation between a feed-forward's products, and a router's normalised scores.

On a GPU, SwiGLU in bfloat16 is one kernel each way, and the scores take fewer kernels. `torch.cuda.jiterator` compiles
these elementwise kernels when they are first called. They round wherever the steps round that other devices run.
silu(x) is not kept for the backward, which computes it again.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_TEXT = """
template <typename T> T rounded(T x) { return T(at::BFloat16(x)); }
template <typename T> T silu(T x) { return rounded(x / (T(1) + std::exp(-x))); }
template <typename T> T of_silu(T gradient, T x, T s) { return gradient * s * (T(1) + x * (T(1) - s)); }
template <typename T> void swiglu"""
_GRADIENTS = """ T of_out = rounded(gradient * silu(x)), of_gate = rounded(rounded(gradient * up) * weight);
    of_up = of_out * weight; of_x = of_silu(of_gate, x, T(1) / (T(1) + std::exp(-x))); """
TEXTS = {
    1: _TEXT + "(T x, T up, T weight, T& out) { out = rounded(silu(x) * up) * weight; }",
    2: _TEXT + "(T gradient, T x, T up, T weight, T& of_x, T& of_up) {" + _GRADIENTS + "}",
    3: f"{_TEXT}(T gradient, T x, T up, T weight, T& of_x, T& of_up, T& share) {{{_GRADIENTS} share = of_out * up; }}",
}
"""Number of results -> a text whose last function is the kernel. It computes in float32; what is stored is rounded."""

_SHARE = """template <typename T> void share"""
SHARES = {
    1: _SHARE + "(T x, T sum, T scale, T& out) { out = x / (sum + T(1e-20)) * scale; }",
    2: _SHARE
    + """(T gradient, T x, T sum, T scale, T& of_x, T& of_sum) {
    T total = sum + T(1e-20), scaled = gradient * scale;
    of_x = scaled / total; of_sum = -scaled * (x / total / total); }""",
}
"""Number of results -> a kernel of `normalised`, in the dtype of the scores. The one with two results takes the shares'
gradient; it returns the gradient of x for a fixed sum, and the terms that add up to the sum's gradient."""

_kernel = cache(lambda *of, **weight: torch.cuda.jiterator._create_multi_output_jit_fn(*of, **weight))


def _results(gradient: Tensor | None, weights: Tensor | None) -> int:
    return 1 if gradient is None else 2 if weights is None else 3


def _by_kernel(gradient: Tensor | None, x: Tensor, up: Tensor, weights: Tensor | None) -> list[Tensor]:
    count, alone = _results(gradient, weights), {"weight": 1.0} if weights is None else {}
    made = _kernel(TEXTS[count], count, **alone)(*(each for each in (gradient, x, up, weights) if each is not None))
    return [made] if count == 1 else [*made]


_LIBRARY = torch.library.Library("ppctl", "DEF")  # for a rehearsal, which sees operators of torch's
_LIBRARY.define("swiglu(Tensor? gradient, Tensor x, Tensor up, Tensor? weights) -> Tensor[]")
_LIBRARY.impl("swiglu", _by_kernel, "CUDA")
_LIBRARY.impl("swiglu", lambda g, x, _, weights: [torch.empty_like(x) for _ in range(_results(g, weights))], "Meta")


def _shares_by_kernel(gradient: Tensor | None, x: Tensor, total: Tensor, scale: float) -> list[Tensor]:
    if gradient is None:
        return [_kernel(SHARES[1], 1, scale=scale)(x, total)]
    return [*_kernel(SHARES[2], 2, scale=scale)(gradient, x, total)]


_LIBRARY.define("share(Tensor? gradient, Tensor x, Tensor total, float scale) -> Tensor[]")
_LIBRARY.impl("share", _shares_by_kernel, "CUDA")
_LIBRARY.impl("share", lambda g, x, *_: [torch.empty_like(x) for _ in range(1 if g is None else 2)], "Meta")


def normalised(x: Tensor, scale: float = 1.0, *, fused: bool = False) -> Tensor:
    """Scores [..., n], none of them negative, each divided by the sum of the n scores, times `scale`. `fused` takes the
    GPU's kernels, which must run here (`fuses_swiglu`)."""
    if fused and not torch.compiler.is_compiling():
        shares: Tensor = _Normalised.apply(x, scale)  # type: ignore[no-untyped-call]  # torch's own
        return shares
    shares = x / (x.sum(-1, keepdim=True) + 1e-20)
    return shares if scale == 1.0 else shares * scale


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Any:
        total, ctx.scale = x.sum(-1, keepdim=True), scale
        ctx.save_for_backward(x, total)
        return torch.ops.ppctl.share(None, x, total, scale)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        of_x, of_sum = torch.ops.ppctl.share(*gradients, *ctx.saved_tensors, ctx.scale)
        return of_x + of_sum.sum(-1, keepdim=True), None


def _shares_by_steps(gradient: Tensor | None, x: Tensor, total: Tensor, scale: float) -> list[Tensor]:
    total = total + 1e-20
    if gradient is None:
        return [x / total * scale]
    scaled = gradient * scale
    return [scaled / total, -scaled * (x / total / total)]


def fuses_swiglu(device: torch.device, *, weighted: bool) -> bool:
    """Whether the kernels run here and give the steps' numbers. This is tried on small matrices, which compiles the
    kernels; those with weights, and a router's, only if `weighted`. Prints on stderr why not."""
    g, x, up = torch.linspace(-8, 8, 3 * 24 * 16, device=device).bfloat16().view(3, 24, 16)
    try:
        if not getattr(sys, "_is_gil_enabled", lambda: True)():
            raise RuntimeError("jiterator's cache of kernels counts on Python's GIL")
        tried: list[tuple[Any, Any, Any]] = [
            (_by_kernel, by_steps, (gradient, x, up, weights))
            for gradient, weights in product((None, g), (None, up[:, :1]) if weighted else (None,))
        ]
        if weighted:
            scores = x.float().sigmoid()
            shares = scores, scores.sum(-1, keepdim=True), 2.5
            tried += [(_shares_by_kernel, _shares_by_steps, (each, *shares)) for each in (None, g.float())]
        for kernel, steps, case in tried:
            for one, other in zip(kernel(*case), steps(*case), strict=True):
                if not torch.allclose(one, other, rtol=2**-6):
                    raise RuntimeError("the kernel's numbers are not those of the steps")
    except (AssertionError, AttributeError, RuntimeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        print(f"rank {os.environ.get('RANK', 0)}: SwiGLU goes step by step: {why}", file=sys.stderr, flush=True)
        return False
    return True


def by_steps(gradient: Tensor | None, x: Tensor, up: Tensor | None, weights: Tensor | None) -> list[Tensor]:
    """The activation, in a list; or, given its `gradient`, the gradients of x and of `up` if there is one. With weights
    another tensor follows them: the sum of each of its rows is the gradient of that row's weight."""
    if up is None and gradient is not None:
        of_out = gradient if weights is None else gradient * weights
        of_x = torch.ops.aten.gelu_backward(of_out, x, approximate="tanh")
        return [of_x] if weights is None else [of_x, F.gelu(x, approximate="tanh").mul_(gradient)]
    made = F.gelu(x, approximate="tanh") if up is None else F.silu(x)
    if gradient is None:
        made = made if up is None else made * up
        return [made if weights is None else made.mul_(weights)]
    assert up is not None  # gelu's gradient is made above
    of_up, of_silu, shares = made.mul_(gradient), gradient * up, []
    if weights is not None:
        shares = [of_up * up]
        of_up.mul_(weights), of_silu.mul_(weights)
    return [torch.ops.aten.silu_backward.grad_input(of_silu, x, grad_input=of_silu), of_up, *shares]


def activation(x: Tensor, up: Tensor | None = None, *, weights: Tensor | None = None, fused: bool = False) -> Tensor:
    """The input of a feed-forward's last product: silu(x) * up (Shazeer 2020, arXiv:2002.05202); without `up` gelu(x).

    With `weights` [n, 1] each row of x [n, width] is multiplied by its weight. `fused` takes the GPU's kernels. GELU is
    the form with tanh, as in GPT-2's code and in what Megatron-LM runs by default (`bias_gelu_fusion`).
    """
    if torch.compiler.is_compiling() and weights is None:
        return by_steps(None, x, up, None)[0]  # a compiler fuses the steps itself
    out: Tensor = _Activation.apply(fused, weights, x, up)  # type: ignore[no-untyped-call]  # torch's own
    return out


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: bool, weights: Tensor | None, x: Tensor, up: Tensor | None) -> Any:
        weights = None if weights is None else weights.to(x.dtype)  # under autocast they may differ
        fused = fused and up is not None and x.dtype == up.dtype == torch.bfloat16  # no kernel compiles for others
        ctx.way = torch.ops.ppctl.swiglu if fused else by_steps
        ctx.save_for_backward(x, up, weights)
        return ctx.way(None, x, up, weights)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, up, weights = ctx.saved_tensors
        made = ctx.way(gradients[0], x, up, weights)
        of_weights = None if weights is None else made.pop().sum(-1, keepdim=True)
        return None, of_weights, made[0], None if up is None else made[1]
