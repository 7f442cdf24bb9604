"""Sends weight gradients of Megatron's layers elsewhere, or computes them later: into float32 accumulators, for the
output layer at the end of a step, and for split backwards in W.

All is plain torch: what a fused kernel adds in place is a product and an addition here. Megatron-core itself is not
imported. Modules that call torch's own functions (the vocabulary-parallel embedding, experts one after another) need no
rule: `weight_gradients.intercept` finds their products with weights.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.errors import Problem, TrainingError
from ppctl.megatron.models import holder_of, misuse
from ppctl.tensors.wide_dtype import wide_dtype
from ppctl.weight_gradients.functions import split_backward
from ppctl.weight_gradients.products import linear
from ppctl.weight_gradients.wide_sums import AtOnce


@contextmanager
def main_gradients(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """While entered, gradients are added to `parameter.main_grad`, and `.grad` stays None.

    `main_grad` is float32 (float64 for a float64 parameter), made with the first gradient if it is missing or None, and
    like `.grad` lives until its owner clears it. Parameters with `grad_added_to_main_grad` are left alone: Megatron's
    DistributedDataParallel, which sets this, moves their gradients, and a fused product's gradient is a dummy.
    """
    with ExitStack() as hooks:
        for parameter in {p: None for chunk in chunks for p in chunk.parameters() if p.requires_grad}:
            handle = parameter.register_post_accumulate_grad_hook(_move)
            hooks.callback(handle.remove)
        yield


def _move(parameter: Tensor) -> None:
    if hasattr(parameter, "grad_added_to_main_grad"):
        return
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        _add_to_main_grad(parameter, gradient)


def _add_to_main_grad(parameter: Any, gradient: Tensor) -> None:
    """Add one microbatch's gradient to the parameter's accumulator."""
    if getattr(parameter, "main_grad", None) is None:
        parameter.main_grad = gradient.to(wide_dtype(parameter.dtype), copy=True)
    else:
        parameter.main_grad.add_(gradient)


def clear_embedding_activation_buffer(config: Any, model: Any, is_last_stage: bool) -> Any:
    """Empty the deferral's buffers on the module that holds the output layer, or make them; return that module, or None
    if nothing is deferred. `model` is a stage, or the list of a rank's chunks, of which the last counts. Raises
    ConfigError if it has no `output_layer`."""
    if not is_last_stage or not getattr(config, "defer_embedding_wgrad_compute", False):
        return None
    stage = model[-1] if isinstance(model, list) else model
    holder = holder_of(stage, "output_layer")
    if holder is None:
        message = (
            f"defer_embedding_wgrad_compute defers an output layer, but {type(stage).__name__} has no output_layer"
        )
        raise misuse(message, "defer_embedding_wgrad_compute=False")
    for name in ("embedding_activation_buffer", "grad_output_buffer"):
        if not hasattr(holder, name):
            setattr(holder, name, [])
        getattr(holder, name).clear()
    return holder


def finish_embedding_wgrad_compute(config: Any, embedding_module: Any, is_last_stage: bool, tp_group: Any) -> None:
    """Compute the output layer's deferred weight gradients, and add them to its `main_grad`, oldest first.

    Raises TrainingError if tensor parallelism with a split sequence would have to gather the activations first.
    """
    if not is_last_stage or not getattr(config, "defer_embedding_wgrad_compute", False):
        return
    if problem := split_sequence(config, tp_group):
        raise TrainingError(problem)
    weight = getattr(embedding_module.output_layer, "weight", None)
    if weight is None:
        weight = embedding_module.shared_embedding_or_output_weight()
    activations, gradients = embedding_module.embedding_activation_buffer, embedding_module.grad_output_buffer
    with torch.no_grad():
        while activations:
            gradient, activation = (each.pop(0).flatten(0, -2) for each in (gradients, activations))
            _add_to_main_grad(weight, gradient.t().mm(activation))


def split_sequence(config: Any, tp_group: Any) -> Problem | None:
    """The problem (PP-E727) if tensor-parallel ranks divide the sequence of what would be deferred; else None."""
    if not getattr(config, "sequence_parallel", False) or tp_group is None or tp_group.size() == 1:
        return None
    message = "deferring the output layer's gradients is not supported yet with sequence parallelism"
    return Problem("PP-E727", message, "config.defer_embedding_wgrad_compute = False")


class Deferral:
    """Defers the output layer's weight gradients of the last microbatches of a step.

    A layer that fills the buffers itself is left alone; for an `nn.Linear` this class fills them. Of `num_microbatches`
    the last `limit` are deferred (0: all), so that gradients still accumulate in microbatch order.
    """

    def __init__(self, config: Any, chunks: list[nn.Module], num_microbatches: int) -> None:
        self._config = config
        last = holder_of(chunks[-1], "output_layer")
        self._fills_buffers = last is not None and hasattr(last, "embedding_activation_buffer")
        self.module = clear_embedding_activation_buffer(config, chunks, True)
        limit = getattr(config, "wgrad_deferral_limit", 0)
        self._from = max(num_microbatches - limit, 0) if limit else 0
        self.microbatch = 0
        """The microbatch whose forward runs now."""

    @contextmanager
    def applied(self) -> Iterator[Deferral]:
        """While entered, the output layer fills the buffers. Raises ConfigError if it cannot and is no nn.Linear."""
        layer = self.module.output_layer
        if self._fills_buffers:
            yield self
            return
        if not isinstance(layer, nn.Linear):
            message = f"defer_embedding_wgrad_compute defers an nn.Linear, but output_layer is a {type(layer).__name__}"
            raise misuse(message, "defer_embedding_wgrad_compute=False")
        # Replaced on the instance for this step: no hook keeps a layer from computing its own gradient.
        layer.forward = self._forward  # type: ignore[method-assign, assignment]  # put over the class's method
        try:
            yield self
        finally:
            del layer.forward
            del self.module.embedding_activation_buffer, self.module.grad_output_buffer

    def finish(self, tp_group: Any) -> None:
        """Compute the deferred weight gradients."""
        finish_embedding_wgrad_compute(self._config, self.module, True, tp_group)

    def _forward(self, x: Tensor) -> Tensor:
        layer = self.module.output_layer
        if self.microbatch < self._from or not torch.is_grad_enabled() or not layer.weight.requires_grad:
            return F.linear(x, layer.weight, layer.bias)
        return linear(_IntoBuffers(self.module), x, layer.weight, layer.bias)


class _IntoBuffers(AtOnce):
    """A collector of deferred gradients that puts a weight gradient's operands into the layer's buffers."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def put(self, weight: Tensor, place: Tensor, make: Any) -> None:
        """Append the operands of `make`, which are a product's gradient and input."""
        gradient, activation, *_ = make.args
        self._module.embedding_activation_buffer.append(activation)
        self._module.grad_output_buffer.append(gradient)


_LINEAR_ARGUMENTS = (
    *("input", "weight", "bias", "gradient_accumulation_fusion", "allreduce_dgrad", "sequence_parallel"),
    *("grad_output_buffer", "wgrad_deferral_limit", "tp_group"),
)
_seen: WeakSet[nn.Module] = WeakSet()


def split_products(chunks: Iterable[nn.Module]) -> None:
    """Register (`split_backward`) the loaded functions of `_RULES`, and the modules in chunks that defer weight
    gradients themselves. A function with unexpected arguments is not split; a function that has a rule keeps it."""
    for home, name, arguments, rule in _RULES:
        function = getattr(sys.modules.get(home), name, None)
        if function is None or hasattr(vars(function).get("apply"), "rule"):
            continue
        if arguments is None or tuple(inspect.signature(function.forward).parameters)[1:] == arguments:
            split_backward(function, **rule)
    for chunk in chunks:
        if chunk not in _seen:
            _seen.add(chunk)
            split_backward(chunk)


def _waits_for_nobody(*args: Any) -> bool:
    """Whether a call may be split: Megatron does not defer its weight gradient (`defer_embedding_wgrad_compute`), and
    autocast does not cast its operands."""
    given = dict(zip(_LINEAR_ARGUMENTS, args, strict=True))
    return given["grad_output_buffer"] is None and not torch._C._is_any_autocast_enabled()


def _of_input(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of input and bias, with the tensor-parallel sum, which is scattered if the sequence is divided."""
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
    """Return the weight's gradient. If it is added to `main_grad` here, return the dummy that DDP's hook expects, or
    None without DDP. A divided sequence is gathered again, as in Megatron, not kept whole between F and W."""
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
    ("grouped_gemm.ops", "GroupedGemm", None, {"weights": (1,)}),  # its backward computes only the needed gradients
)
"""Module, function, its arguments if the rule depends on them, and the rule."""
