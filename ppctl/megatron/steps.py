"""One forward with its loss, one backward, and freeing of sent outputs: for users who write their own loops.

The forward-backward functions run `forward_step` as a stage's program; their backwards are the engine's. Nothing is
scaled in place: tensors from a loss function stay unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ppctl.comm.modes import torch_dtype
from ppctl.errors import Problem, TrainingError
from ppctl.megatron.models import give_input, holder_of, timed
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.schedule.schedule_table import WarmupCounts, warmup_counts

LossFunction = Callable[..., Any]


class LossScaleError(TrainingError, ValueError):
    """The scale of an auxiliary loss is not one number."""


def forward_step_calc_loss(
    model: nn.Module,
    output_tensor: Any,
    loss_func: LossFunction | None,
    config: Any,
    vp_stage: int | None,
    collect_non_loss_data: bool,
    num_microbatches: int,
    forward_data_store: list[Any],
    cp_group_size: int | None = None,
    is_last_stage: bool | None = None,
) -> tuple[Any, Tensor]:
    """Return (the output or scaled loss, the number of tokens as a new int32 scalar, 0 unless `loss_func` counts them).

    With gradients on, this also sets the scale of losses inside the layers. Only the last stage calls
    `loss_func(output_tensor)` and appends to `forward_data_store`:

    * without a loss function the output itself is stored;
    * with `collect_non_loss_data`, whatever `loss_func(output_tensor, non_loss_data=True)` returns is stored;
    * of a pair `(loss, data)`, the data; the loss becomes `loss * cp_group_size / num_microbatches`;
    * of a triple `(loss, num_tokens, data)`, the data; the loss becomes `loss / max(num_tokens, 1) / num_microbatches`,
      or with `config.calculate_per_token_loss` stays the sum that it is.

    `cp_group_size` defaults to the config's, `is_last_stage` to this rank's place in a pipeline that is the world.
    Raises TrainingError for any other form, for `num_tokens` that is not one integer, and for a pair, which has no
    tokens, if losses are per token.
    """
    last = is_last_of_world(vp_stage, config) if is_last_stage is None else is_last_stage
    none = torch.zeros((), dtype=torch.int, device=_device_of(output_tensor))
    cp = getattr(config, "context_parallel_size", 1) if cp_group_size is None else cp_group_size
    result = output_tensor, none
    if last and loss_func is None:
        forward_data_store.append(output_tensor)
    elif last and collect_non_loss_data:
        assert loss_func is not None
        forward_data_store.append(loss_func(output_tensor, non_loss_data=True))
    elif last:
        assert loss_func is not None
        loss, tokens, data = _read(loss_func(output_tensor), none, config, num_microbatches, cp)
        forward_data_store.append(data)
        result = loss, tokens
    if torch.is_grad_enabled():
        _scale_auxiliary_losses(model, config, num_microbatches, cp, output_tensor)
    return result


def _read(returned: Any, none: Tensor, config: Any, num_microbatches: int, cp: int) -> tuple[Any, Tensor, Any]:
    """(the scaled loss, the tokens, the data) of a loss function's result. Raises TrainingError for other forms."""
    per_token = getattr(config, "calculate_per_token_loss", False)
    if isinstance(returned, tuple) and len(returned) == 3:
        loss, counted, data = returned
        tokens = torch.as_tensor(counted, device=none.device)
        if tokens.is_floating_point() or tokens.numel() != 1:
            what = f"{str(tokens.dtype).removeprefix('torch.')}{list(tokens.shape)}"
            message = f"num_tokens is {what}, but is the number of tokens that count, one integer, as on other ranks"
            raise TrainingError(Problem("PP-E725", message, "return loss, loss_mask.sum().int(), data"))
        if not per_token:
            loss = loss / tokens.clamp(min=1) / num_microbatches
        return loss, tokens.reshape(()).to(none.dtype, copy=True), data
    if isinstance(returned, tuple) and len(returned) == 2:
        if per_token and torch.is_grad_enabled():
            message = "calculate_per_token_loss divides by tokens, but the function returned a pair, without a count"
            raise TrainingError(Problem("PP-E725", message, "return loss, num_tokens, data"))
        loss, data = returned
        return (loss * cp if cp != 1 else loss) / num_microbatches, none, data
    form = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    message = f"the loss function returned {form}: it must return (loss, data) or (loss, num_tokens, data)"
    raise TrainingError(Problem("PP-E725", message, "return loss, {'lm loss': loss.detach()}"))


def is_last_of_world(vp_stage: int | None, config: Any) -> bool:
    """Whether this rank's chunk is the model's last, if the world is one pipeline."""
    chunks = getattr(config, "virtual_pipeline_model_parallel_size", None) or 1
    last_rank = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    return last_rank and vp_stage in (None, chunks - 1)


_AUXILIARY = (
    ("num_moe_experts", "moe", True, "moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("mtp_num_layers", "mtp", False, "multi_token_prediction", "MTPLossAutoScaler"),
    ("experimental_attention_variant", "experimental_attention_variant", True, "", ""),  # the config has the setter
)
"""The config's field of a loss, the loss's name here, whether the context parallel size multiplies its scale, and
Megatron's module and class that attach it."""


def _scale_auxiliary_losses(model: nn.Module, config: Any, num_microbatches: int, cp: int, output: Any) -> None:
    """Set the scale of losses inside the layers, to match the main loss, before the microbatch's backward. The scale, a
    tensor of one element on the output's device, is the result of the loss's own function (`moe_grad_scale_func`), else
    of `grad_scale_func`, for 1. Unless losses are per token it is divided by the number of microbatches and, except for
    multi-token prediction, multiplied by the context parallel size. It is set on Megatron's autograd function, if that
    is loaded, by every submodule's `set_moe_loss_scale` or `set_mtp_loss_scale`, and by the config's function for its
    attention variant. Raises LossScaleError unless a function returns one number."""
    one = torch.ones(1, device=_device_of(output))
    for field, kind, times_cp, module, name in _AUXILIARY:
        if getattr(config, field, None) is None:
            continue
        function = getattr(config, f"{kind}_grad_scale_func", None) or getattr(config, "grad_scale_func", None)
        scale = one if function is None else torch.as_tensor(function(one), device=one.device)
        if scale.numel() != 1:
            message = f"the {kind} loss has one scale, but its function returned {scale.numel()} numbers"
            raise LossScaleError(Problem("PP-E725", message, f"{kind}_grad_scale_func=None"))
        if not getattr(config, "calculate_per_token_loss", False):
            scale = scale * (cp if times_cp else 1) / num_microbatches
        # Never imported here: a model that attaches this loss has loaded its class.
        scaler = getattr(sys.modules.get(f"megatron.core.transformer.{module}"), name, None)
        setters = [getattr(each, f"set_{kind}_loss_scale", None) for each in getattr(model, "modules", tuple)()]
        setters += [getattr(scaler, "set_loss_scale", None), getattr(config, f"{kind}_loss_scale_func", None)]
        for set_scale in filter(None, setters):
            set_scale(scale.clone())  # Megatron keeps the first tensor and copies later ones into it


def _device_of(output: Any) -> torch.device:
    first = output[0] if isinstance(output, list | tuple) and output else output
    return first.device if isinstance(first, Tensor) else torch.device("cpu")


ForwardStep = Callable[..., tuple[Any, Callable[..., Any] | None]]


class OutputInUse(TrainingError, AssertionError):
    """An output cannot be freed: it is not a tensor of its own."""


def forward_step(
    forward_step_func: ForwardStep,
    data_iterator: Any,
    model: nn.Module,
    num_microbatches: int,
    input_tensor: Any,
    forward_data_store: list[Any],
    config: Any,
    cp_group_size: int,
    collect_non_loss_data: bool = False,
    checkpoint_activations_microbatch: bool | None = None,
    is_first_microbatch: bool = False,
    current_microbatch: int | None = None,
    vp_stage: int | None = None,
    is_last_stage: bool = True,
) -> tuple[Any, Tensor]:
    """Run one microbatch through a stage: (output, number of tokens); the output is the scaled loss on the last stage.

    `forward_step_func(data_iterator, model)` returns the output and the loss function; if
    `checkpoint_activations_microbatch` is not None it is passed as a third argument. Before that the model gets
    `input_tensor` (`set_input_tensor`, always as a list), its microbatch, and whether that is the first one
    (`set_is_first_microbatch`). `forward_step_calc_loss` says what is stored. For a list of inputs the output is a
    list.
    """
    with timed(config, "forward-compute"):
        _announce(model, is_first_microbatch, current_microbatch)
        inputs = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        give_input(model, inputs)
        flag = () if checkpoint_activations_microbatch is None else (checkpoint_activations_microbatch,)
        with _autocast(config, model):
            output, loss_func = _output_and_loss(forward_step_func, data_iterator, model, *flag)
        output, num_tokens = forward_step_calc_loss(
            model,
            output,
            loss_func,
            config,
            vp_stage,
            collect_non_loss_data,
            num_microbatches,
            forward_data_store,
            cp_group_size,
            is_last_stage,
        )
    if isinstance(input_tensor, list) and not isinstance(output, list):
        output = list(output) if isinstance(output, tuple) else [output]
    return output, num_tokens


def check_attached(model: nn.Module, outputs: Sequence[Any]) -> None:
    """Raise TrainingError (PP-E729) if a first stage has trained parameters but its output has no graph. On other
    stages the missing gradient of the input shows this."""
    if any(not isinstance(output, Tensor) or output.requires_grad for output in outputs):
        return  # the engine refuses other values
    if any(parameter.requires_grad for parameter in model.parameters()):
        message = "the first stage's output needs no gradient, but its parameters do: they would never be trained"
        remedy = "no detach or no_grad in the stage, and checkpoint(..., use_reentrant=False); or freeze its parameters"
        raise TrainingError(Problem("PP-E729", message, remedy))


def _output_and_loss(forward_step_func: ForwardStep, data_iterator: Any, *more: Any) -> tuple[Any, Any]:
    """Call the user's step; return (output, loss function). Raises TrainingError for other results, or if data end."""
    try:
        returned = forward_step_func(data_iterator, *more)
    except StopIteration as ended:
        message = "the data iterator has ended: it has fewer microbatches than this call"
        raise TrainingError(Problem("PP-E728", message, "fewer num_microbatches, or more data")) from ended
    if isinstance(returned, tuple | list) and len(returned) == 2:
        return returned[0], returned[1]
    form = f"{len(returned)} things" if isinstance(returned, tuple | list) else f"a {type(returned).__name__}"
    message = f"forward_step_func returned {form}: it must return the stage's output and the loss function"
    raise TrainingError(Problem("PP-E728", message, "return model(batch), loss_func"))


def backward_step(
    input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, model_type: Any = None, config: Any = None
) -> Any:
    """Run the backward of a stage's output; return the gradient of the stage's input, a list for a list, or None.

    A first output without a gradient is the loss, and is scaled by `config.grad_scale_func` if there is one. All
    outputs of a list that have a gradient take part: the result is the gradient of the loss, not only of the first
    output (decision 7). The `model_type` of older callers is ignored, and may be left out: `backward_step(input,
    output, gradient, config)`. On the first stage the input, and so the result, is None. Raises TrainingError if an
    input gets no gradient, or if an output without a gradient is no loss.
    """
    config = model_type if config is None else config
    with timed(config, "backward-compute"):
        inputs, outputs, gradients = _listed(input_tensor), _listed(output_tensor), _listed(output_tensor_grad)
        for tensor in inputs:
            if tensor is not None:
                tensor.retain_grad()
        gradients += [None] * (len(outputs) - len(gradients))
        if gradients[0] is None and outputs[0] is not None and outputs[0].requires_grad:
            outputs[0], gradients[0] = _loss_and_seed(outputs[0], getattr(config, "grad_scale_func", None))
        pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
        if pairs:
            edges = [get_gradient_edge(output) for output, _ in pairs]
            torch.autograd.backward(edges, [gradient for _, gradient in pairs])
    of_inputs = [None if tensor is None else _gradient_of(tensor) for tensor in inputs]
    return of_inputs if isinstance(input_tensor, list) else of_inputs[0]


def _loss_and_seed(loss: Tensor, scale: Callable[[Tensor], Tensor] | None) -> tuple[Tensor, Tensor]:
    """The scaled loss and the gradient that its backward starts from."""
    loss = loss if scale is None else scale(loss)
    if loss.numel() != 1:
        message = f"an output without a gradient is the loss, but this is {_describe(loss)}"
        raise TrainingError(Problem("PP-E714", message, "pass the gradient that the next stage sent"))
    return loss, torch.ones_like(loss)


def custom_backward(output: Tensor, grad_output: Tensor | None) -> None:
    """Run the backward from a freed output; only its place in the graph is needed.

    Without `grad_output` the output must be a loss: a scalar from the start. Raises OutputInUse for an output that was
    not freed.
    """
    if not isinstance(output, Tensor) or output.numel() != 1:
        message = f"custom_backward starts from an output that was freed, or from a loss, not from {_describe(output)}"
        raise OutputInUse(Problem("PP-E726", message, "deallocate_output_tensor(output, True)"))
    gradient = torch.ones_like(output) if grad_output is None else grad_output
    torch.autograd.backward([get_gradient_edge(output)], [gradient])


def deallocate_output_tensor(out: Any, deallocate_pipeline_outputs: bool = False) -> None:
    """Free the data of a sent output (or a list or dict of outputs), and keep its place in the graph. Raises
    OutputInUse for a view, whose memory belongs to another tensor, and for values other than tensors.
    """
    if out is None or not deallocate_pipeline_outputs:
        return
    if isinstance(out, list | tuple | dict):
        for each in out.values() if isinstance(out, dict) else out:
            deallocate_output_tensor(each, True)
        return
    if not isinstance(out, Tensor) or out._base is not None:
        what = "a view of another tensor" if isinstance(out, Tensor) else _describe(out)
        message = f"{what} has no memory of its own to free"
        raise OutputInUse(Problem("PP-E726", message, "return a tensor of its own: output.clone()"))
    out.data = torch.empty((1,), device=out.device, dtype=out.dtype)


def _announce(model: nn.Module, is_first_microbatch: bool, current_microbatch: int | None) -> None:
    holder = holder_of(model, "set_is_first_microbatch")
    if is_first_microbatch and holder is not None:
        holder.set_is_first_microbatch()
    if current_microbatch is not None:
        set_current_microbatch(model, current_microbatch)


def _autocast(config: Any, model: nn.Module) -> AbstractContextManager[Any]:
    if not getattr(config, "enable_autocast", False):
        return nullcontext()
    device = next((p.device.type for p in model.parameters()), "cpu")
    return torch.autocast(device, dtype=torch_dtype(getattr(config, "autocast_dtype", None), "autocast_dtype"))


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _gradient_of(tensor: Tensor) -> Tensor:
    """The gradient of a stage's input. Raises TrainingError (PP-E713) without one."""
    if tensor.grad is None:
        message = "the stage's input has no gradient: the stage's output does not depend on it"
        remedy = "let the output depend on the input (a detach or a no_grad inside is the usual cause)"
        raise TrainingError(Problem("PP-E713", message, remedy))
    return tensor.grad


def _describe(thing: object) -> str:
    return f"a tensor of shape {list(thing.shape)}" if isinstance(thing, Tensor) else f"a {type(thing).__name__}"


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: P2PCommunicator | None = None,
) -> WarmupCounts:
    """How this rank's microbatches divide: (total, all_in_warmup, warmup, remaining), counted over all chunks.

    The communicator has the group's size and rank, and the virtual pipeline size: if that is set, even to 1, the counts
    are of the interleaved schedule. Without a communicator the pipeline is the world, if there is one.
    """
    if p2p_communicator is None:
        pp, pp_rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        interleaved = num_model_chunks > 1
    else:
        pp, pp_rank = p2p_communicator.pp_group.size(), p2p_communicator.pp_group.rank()
        interleaved = p2p_communicator.virtual_pipeline_model_parallel_size is not None
    return warmup_counts(
        pp,
        pp_rank,
        num_microbatches=num_microbatches,
        num_model_chunks=num_model_chunks,
        microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
        interleaved=interleaved,
        forward_only=forward_only,
        overlap_moe_expert_parallel_comm=overlap_moe_expert_parallel_comm,
    )


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """The flag for the first microbatch: `cond`; in a validation that passes `first_val_step`, both must be true."""
    return bool(first_val_step and cond) if forward_only and first_val_step is not None else cond


def set_current_microbatch(model: Any, microbatch_id: int) -> None:
    """Tell every layer of the model's decoder, and of its multi-token prediction, the number of its microbatch."""
    holder = holder_of(model, "decoder")
    for layer in getattr(getattr(holder, "decoder", None), "layers", ()):
        layer.current_microbatch = microbatch_id
    for layer in getattr(getattr(holder, "mtp", None), "layers", ()):
        getattr(layer, "transformer_layer", layer).current_microbatch = microbatch_id
