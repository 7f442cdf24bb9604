"""Megatron's products with weights in split backwards: its linear layers, and Transformer Engine's below them.

Nothing of Megatron-core is imported unless it is loaded already. What calls torch's functions by itself (the
vocabulary-parallel embedding, experts one after another) needs no rule: products with weights are found in it
(`weight_gradients.intercept`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppctl.weight_gradients.functions import split_backward

_LINEAR_ARGUMENTS = (
    *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"),
    *("grad_output_buffer", "wgrad_deferral_limit", "tp_group"),
)
_seen: WeakSet[nn.Module] = WeakSet()


def split_products(chunks: Iterable[nn.Module]) -> None:
    """Register the functions that are loaded, and the modules of the chunks that defer weight gradients themselves. A
    function with other arguments than the rule was written for is not split, one that has a rule keeps it."""
    for home, name, arguments, rule in _RULES:
        function = getattr(sys.modules.get(home), name, None)
        if function is None or hasattr(function.apply, "whole"):
            continue
        if arguments is None or tuple(inspect.signature(function.forward).parameters)[1:] == arguments:
            split_backward(function, **rule)
    for chunk in chunks:
        if chunk not in _seen:
            _seen.add(chunk)
            split_backward(chunk)


def _waits_for_nobody(*args: Any) -> bool:
    """Whether a call's weight gradient is not deferred by Megatron itself (`defer_embedding_wgrad_compute`), nor its
    operands cast by autocast."""
    given = dict(zip(_LINEAR_ARGUMENTS, args, strict=True))
    return given["grad_output_buffer"] is None and not torch._C._is_any_autocast_enabled()


def _of_input(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of input and bias, with the tensor-parallel sum: scattered if the sequence is divided."""
    x, weight = ctx.saved_tensors
    of_input = gradient.matmul(weight)
    if ctx.sequence_parallel:
        part = torch.empty_like(x)
        work = dist.reduce_scatter_tensor(part, of_input, group=ctx.tp_group, async_op=True)
    elif ctx.allreduce_dgrad:
        part = of_input
        work = dist.all_reduce(part, group=ctx.tp_group, async_op=True)
    else:
        part, work = of_input, None
    of_bias = _flat(gradient).sum(dim=0) if ctx.use_bias else None
    if work is not None:
        work.wait()
    return part, None, of_bias, *(None for _ in _LINEAR_ARGUMENTS[3:])


def _of_weight(ctx: Any, gradient: Tensor) -> tuple[Tensor | None]:
    """The weight's gradient; if it is added to `main_grad` by itself, the dummy for which DDP's hook waits. A divided
    sequence is gathered again, as Megatron does it: the whole one is not kept between F and W."""
    x, weight = ctx.saved_tensors
    if ctx.sequence_parallel:
        whole = x.new_empty((x.shape[0] * ctx.tp_group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(whole, x, group=ctx.tp_group)
        x = whole
    rows, x = _flat(gradient), _flat(x)
    if not ctx.gradient_accumulation_fusion:
        return (rows.t().matmul(x),)
    weight.main_grad = ctx.main_grad
    _add_product(weight, x, rows)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return (None,)
    weight.grad_added_to_main_grad = True
    make = torch.zeros if getattr(weight, "zero_out_wgrad", False) else torch.empty
    return (make(weight.main_grad.shape, dtype=x.dtype, device=x.device),)


def _add_product(weight: Any, x: Tensor, gradient: Tensor) -> None:
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
        torch.matmul(gradient.t(), x, out=weight.main_grad)
        return
    kernels: Any = sys.modules["fused_weight_gradient_mlp_cuda"]
    single = weight.main_grad.dtype == torch.float32
    add = kernels.wgrad_gemm_accum_fp32 if single else kernels.wgrad_gemm_accum_fp16
    add(x, gradient, weight.main_grad)


def _flat(tensor: Tensor) -> Tensor:
    """[..., n] as contiguous rows [_, n]."""
    tensor = tensor.contiguous()
    return tensor if tensor.dim() == 2 else tensor.view(-1, tensor.shape[-1])


_RULES: tuple[tuple[str, str, tuple[str, ...] | None, dict[str, Any]], ...] = (
    (
        "megatron.core.tensor_parallel.layers",
        "LinearWithGradAccumulationAndAsyncCommunication",
        _LINEAR_ARGUMENTS,
        {"weights": (1,), "of_input": _of_input, "of_weights": _of_weight, "applies": _waits_for_nobody},
    ),
    ("grouped_gemm.ops", "GroupedGemm", None, {"weights": (1,)}),  # its backward computes only what is needed
)
"""Module, function, its arguments if the rule depends on them, and the rule."""
