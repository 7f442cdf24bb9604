"""Weight gradients that go elsewhere or come later: float32 accumulators, and deferred ones of the output layer.

All in plain torch: what a fused kernel would add in place is a product and an addition here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.errors import Problem, TrainingError
from ppctl.megatron.models import holder_of, misuse
from ppctl.tensors.wide_dtype import wide_dtype
from ppctl.weight_gradients.products import linear
from ppctl.weight_gradients.wide_sums import AtOnce


@contextmanager
def main_gradients(chunks: Sequence[nn.Module]) -> Iterator[None]:
    """While it lasts, gradients are added to `parameter.main_grad` and `.grad` stays None.

    `main_grad` is float32 (float64 for a float64 parameter), made with the first gradient if it is missing or None,
    and like `.grad` lives until its owner clears it. A parameter that has `grad_added_to_main_grad` is left alone: who
    set that (Megatron's DistributedDataParallel) moves its gradient, and a fused product's is a dummy.
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
        add_to_main_grad(parameter, gradient)


def add_to_main_grad(parameter: Any, gradient: Tensor) -> None:
    """Add one microbatch's gradient to the parameter's accumulator."""
    if getattr(parameter, "main_grad", None) is None:
        parameter.main_grad = gradient.to(wide_dtype(parameter.dtype), copy=True)
    else:
        parameter.main_grad.add_(gradient)


def clear_embedding_activation_buffer(config: Any, model: Any, is_last_stage: bool) -> Any:
    """The module that holds the output layer, its buffers empty; None if nothing is deferred.

    `model` is a stage or the list of a rank's chunks, whose last one it is. Raises ConfigError if no module in it
    has an `output_layer`.
    """
    if not is_last_stage or not getattr(config, "defer_embedding_wgrad_compute", False):
        return None
    stage = model[-1] if isinstance(model, list) else model
    holder = holder_of(stage, "output_layer")
    if holder is None:
        message = (
            f"defer_embedding_wgrad_compute defers an output layer, and {type(stage).__name__} has no output_layer"
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
    if getattr(config, "sequence_parallel", False) and tp_group is not None and tp_group.size() > 1:
        message = "deferring the output layer's gradients comes later for sequence parallelism"
        raise TrainingError(Problem("PP-E727", message, "defer_embedding_wgrad_compute=False"))
    weight = getattr(embedding_module.output_layer, "weight", None)
    if weight is None:
        weight = embedding_module.shared_embedding_or_output_weight()
    activations, gradients = embedding_module.embedding_activation_buffer, embedding_module.grad_output_buffer
    with torch.no_grad():
        while activations:
            gradient, activation = (each.pop(0).flatten(0, -2) for each in (gradients, activations))
            add_to_main_grad(weight, gradient.t().mm(activation))


class Deferral:
    """The output layer's weight gradients of the last microbatches of a step, deferred.

    A layer that fills the buffers by itself is left alone; for an `nn.Linear` this does it. Of `num_microbatches` the
    last `limit` are deferred (0: all), so that gradients still accumulate in microbatch order.
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
        """While it lasts, the output layer puts its weight gradients into the buffers."""
        layer = self.module.output_layer
        if self._fills_buffers:
            yield self
            return
        if not isinstance(layer, nn.Linear):
            message = f"defer_embedding_wgrad_compute defers an nn.Linear; output_layer is a {type(layer).__name__}"
            raise misuse(message, "defer_embedding_wgrad_compute=False")
        # On the instance alone and for this step: no hook keeps a layer from computing its own gradient.
        layer.forward = self._forward  # type: ignore[method-assign, assignment]  # put over the class's method
        try:
            yield self
        finally:
            del layer.forward
            del self.module.embedding_activation_buffer, self.module.grad_output_buffer

    def finish(self, tp_group: Any) -> None:
        """Compute what was deferred."""
        finish_embedding_wgrad_compute(self._config, self.module, True, tp_group)

    def _forward(self, x: Tensor) -> Tensor:
        layer = self.module.output_layer
        if self.microbatch < self._from or not torch.is_grad_enabled() or not layer.weight.requires_grad:
            return F.linear(x, layer.weight, layer.bias)
        return linear(_IntoBuffers(self.module), x, layer.weight, layer.bias)


class _IntoBuffers(AtOnce):
    """In place of a collector of deferred gradients: what a weight's gradient is computed from goes into buffers."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def put(self, weight: Tensor, place: Tensor, make: Any) -> None:
        """Append the operands of `make`, which are a product's gradient and input."""
        gradient, activation, *_ = make.args
        self._module.embedding_activation_buffer.append(activation)
        self._module.grad_output_buffer.append(gradient)
