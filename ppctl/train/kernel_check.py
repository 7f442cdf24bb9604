"""Compares a kernel that is not ppctl's with a reference: results and gradients, on random numbers
(`ppctl.check_kernel`).

References compute in float64, unfused; a dispatch's reference is ppctl's own over all ranks of the default process
group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ppctl.config.schema import ModelConfig
from ppctl.errors import Problem, TrainingError
from ppctl.model.outside_kernels import Kernel, KernelUse
from ppctl.parallel.dispatch import ExpertExchange

TensorFunction = Callable[..., Tensor]
"""(kernel's function or None, *tensors) -> result: by the kernel, or by the reference."""


def check_kernel(kernel: Kernel, use: KernelUse, *, seed: int = 0) -> dict[str, float]:
    """`result`, `gradient N` -> the kernel's largest difference, as a share of the reference's largest value.

    Numbers are drawn with `seed` on the device of `use`, with its sizes. Raises TrainingError (PP-E773) if the
    kernel does not fit the use, returns another shape or dtype, differs by more than its tolerance, or keeps or shares
    the memory of a gradient. For a dispatch all ranks of the default process group call it.
    """
    if reason := kernel.against(use):
        raise _mismatch(kernel, f"does not fit this use: {reason}")
    draw, (shapes, compute) = torch.Generator().manual_seed(seed), _CASES[kernel.role](use)
    case = [torch.randn(shape, generator=draw, device="cpu").to(use.device, use.dtype) for shape in shapes]
    leaves = [tensor.clone().requires_grad_() for tensor in case]
    (result, *given), weights = _outcome(compute, kernel.function, leaves)
    own = [result.clone(), *(gradient.clone() for gradient in given)]
    for number, gradient in enumerate(given):  # they are given away: from here on a caller may write there
        if torch._debug_has_internal_overlap(gradient) != 1:  # expanded: memory for fewer numbers than it has
            gradient.fill_(number)
    again, _ = _outcome(compute, kernel.function, leaves, weights)
    expected, _ = _outcome(compute, None, [tensor.double().requires_grad_() for tensor in case])
    names, found = ["result", *(f"gradient {number}" for number in range(len(case)))], {}
    for name, tensor, wanted in zip(names, own, expected, strict=True):
        if (tensor.shape, tensor.dtype) != (wanted.shape, use.dtype):
            wrong = f"{list(tensor.shape)} {tensor.dtype}, not {list(wanted.shape)} {use.dtype}"
            raise _mismatch(kernel, f"has a {name} of {wrong}")
        found[name] = _difference(tensor, wanted)
        if not found[name] <= kernel.tolerance:  # nor is nan
            far = f"{found[name]:.2g} of the reference's largest value, more than its tolerance {kernel.tolerance:.2g}"
            raise _mismatch(kernel, f"has a {name} that differs by {far}")
    overwritten = [bool((gradient != number).any()) for number, gradient in enumerate(given)]
    altered = [not _difference(*pair) <= kernel.tolerance for pair in zip(again, expected, strict=True)]
    if any(overwritten) or any(altered):
        name = f"gradient {overwritten.index(True)}" if any(overwritten) else names[altered.index(True)]
        raise _mismatch(kernel, f"keeps or shares memory of gradients, which ppctl adds to in place: see its {name}")
    return found


def _difference(tensor: Tensor, wanted: Tensor) -> float:
    return float((tensor - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def _mismatch(kernel: Kernel, message: str) -> TrainingError:
    remedy = "docs/kernels.md says what the role asks of a function"
    return TrainingError(Problem("PP-E773", f"the kernel for {kernel.role} {message}", remedy))


def _outcome(
    compute: TensorFunction, kernel: TensorFunction | None, leaves: Sequence[Tensor], weights: Tensor | None = None
) -> tuple[list[Tensor], Tensor]:
    """([the result, the gradient of each leaf], the result's gradient, which is `weights` if they are given)."""
    result = compute(kernel, *leaves)
    if weights is None:  # equal numbers in every dtype
        numbers = torch.linspace(-1.0, 1.0, result.numel(), dtype=torch.bfloat16, device="cpu")
        weights = numbers.to(result).view(result.shape)
    # A tensor on which the result does not depend has a gradient of zeros.
    return [result.detach(), *torch.autograd.grad(result, leaves, weights, materialize_grads=True)], weights


Case = tuple[Sequence[Sequence[int]], TensorFunction]
"""(shapes of the tensors, the function of them)."""


def _attention(use: KernelUse) -> Case:
    """The shapes of queries, keys and values, and causal attention of them: by the kernel, or by the reference if
    `kernel` is None."""
    scale = 0.9 * use.width**-0.5

    def compute(kernel: TensorFunction | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if kernel is not None:
            return kernel(q, k, v, scale)
        k, v = (each.repeat_interleave(use.heads // use.groups, 1) for each in (k, v))
        behind = torch.ones(use.length, use.length, dtype=torch.bool, device=q.device).triu(1)
        mixed: Tensor = (q @ k.mT * scale).masked_fill(behind, -torch.inf).softmax(-1) @ v
        return mixed

    widths = (use.heads, use.width), (use.groups, use.width), (use.groups, use.values_width)
    return [(2, heads, use.length, width) for heads, width in widths], compute


def _grouped(use: KernelUse) -> Case:
    sizes = [0, *(5 + 3 * number for number in range(max(use.experts, 2) - 1))]  # one group has no rows
    ends = torch.tensor(sizes, device=use.device).cumsum(0, dtype=torch.int32)

    def compute(kernel: TensorFunction | None, rows: Tensor, weights: Tensor) -> Tensor:
        if kernel is not None:
            return kernel(rows, weights, ends)
        return torch.cat([F.linear(part, weight) for part, weight in zip(rows.split(sizes), weights, strict=True)])

    return [(sum(sizes), use.hidden), (len(sizes), use.expert_width or use.hidden, use.hidden)], compute


def _norm(use: KernelUse) -> Case:
    def compute(kernel: TensorFunction | None, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if kernel is not None:
            return kernel(x, weight, bias, use.epsilon)
        x = x if bias is None else x - x.mean(-1, keepdim=True)
        normed = x * (x.square().mean(-1, keepdim=True) + use.epsilon).rsqrt() * weight
        return normed if bias is None else normed + bias

    return [(2, use.length, use.hidden), *[(use.hidden,)] * (1 + use.bias)], compute


def _dispatch(use: KernelUse) -> Case:
    """Rows that each go to two experts. Each expert multiplies a row by its routing weight and by 2 ** (the expert's
    rank)."""
    ranks, own = dist.get_world_size(), dist.get_rank()
    model = ModelConfig(num_moe_experts=2 * ranks, moe_router_topk=2)
    pairs = torch.combinations(torch.arange(2 * ranks, device="cpu"), 2)[own:]  # another number of rows on each rank
    chosen, counts = pairs.to(use.device), pairs.flatten().bincount(minlength=2 * ranks).to(use.device)

    def compute(kernel: TensorFunction | None, rows: Tensor, weights: Tensor) -> Tensor:
        make: Callable[..., Callable[..., Tensor]] = kernel or ExpertExchange  # type: ignore[assignment]
        exchange = make({"ep": dist.group.WORLD}, model)
        return exchange(rows, chosen, weights, counts, lambda come, weighed, _: come * weighed * 2.0**own)

    return [(len(pairs), use.hidden), (len(pairs), 2)], compute


_CASES: dict[str, Callable[[KernelUse], Case]] = {
    "attention": _attention,
    "grouped_product": _grouped,
    "norm": _norm,
    "dispatch": _dispatch,
}
