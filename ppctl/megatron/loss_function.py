"""A user's loss function on the last stage: the loss whose backward runs, the data to store, the tokens to count.

Knows the forms in which a loss function may return. Must not know the engine or the schedule. Nothing is scaled in
place: the tensors that a loss function returns stay as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppctl.errors import Problem, TrainingError
from ppctl.megatron.models import setting

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
    """The output to hand on and the number of tokens it stands for (an int tensor, 0 unless `loss_func` counts them).

    Only the last stage calls `loss_func(output_tensor)` and appends to `forward_data_store`:

    * without a loss function the output itself is stored;
    * with `collect_non_loss_data`, whatever `loss_func(output_tensor, non_loss_data=True)` returns is stored;
    * of a pair `(loss, data)`, the data; the loss becomes `loss * cp_group_size / num_microbatches`;
    * of a triple `(loss, num_tokens, data)`, the data; the loss becomes `loss / max(num_tokens, 1) / num_microbatches`,
      or with `config.calculate_per_token_loss` stays the sum that it is.

    `cp_group_size` defaults to the config's, `is_last_stage` to this rank's place in a pipeline that is the world.
    Raises TrainingError for any other form, and for a pair if the loss per token was asked for: it counts none.
    """
    last = is_last_of_world(vp_stage, config) if is_last_stage is None else is_last_stage
    none = torch.zeros((), dtype=torch.int, device=_device_of(output_tensor))
    cp = setting(config, "context_parallel_size", 1) if cp_group_size is None else cp_group_size
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
    """The scaled loss, the tokens and the data of what a loss function returned."""
    per_token = setting(config, "calculate_per_token_loss", False)
    if isinstance(returned, tuple) and len(returned) == 3:
        loss, counted, data = returned
        tokens = torch.as_tensor(counted, device=none.device)
        if not per_token:
            loss = loss / tokens.clamp(min=1) / num_microbatches
        return loss, tokens, data
    if isinstance(returned, tuple) and len(returned) == 2:
        if per_token and torch.is_grad_enabled():
            message = "calculate_per_token_loss divides by tokens; the loss function returned a pair, without a count"
            raise TrainingError(Problem("PP-E725", message, "return loss, num_tokens, data"))
        loss, data = returned
        return (loss * cp if cp != 1 else loss) / num_microbatches, none, data
    form = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    message = f"the loss function returned {form}: it may be (loss, data) or (loss, num_tokens, data)"
    raise TrainingError(Problem("PP-E725", message, "return loss, {'lm loss': loss.detach()}"))


def is_last_of_world(vp_stage: int | None, config: Any) -> bool:
    """Whether this rank's chunk is the model's last, if the world is one pipeline."""
    chunks = setting(config, "virtual_pipeline_model_parallel_size") or 1
    last_rank = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
    return last_rank and vp_stage in (None, chunks - 1)


_AUXILIARY = (
    ("num_moe_experts", "moe", True, "moe.moe_utils", "MoEAuxLossAutoScaler"),
    ("mtp_num_layers", "mtp", False, "multi_token_prediction", "MTPLossAutoScaler"),
    ("experimental_attention_variant", "experimental_attention_variant", True, "", ""),  # its config has the setter
)
"""The config's field of a loss, its name here, whether the context parallel size multiplies it, and the module and the
class of Megatron that attach it."""


def _scale_auxiliary_losses(model: nn.Module, config: Any, num_microbatches: int, cp: int, output: Any) -> None:
    """Set the factor by which losses inside the layers count as the main loss does, before the microbatch's backward.

    It is what `moe_grad_scale_func` or `mtp_grad_scale_func` (else `grad_scale_func`) returns for 1, divided by the
    microbatches unless the loss is per token, for MoE times the context parallel size: a tensor of one element on the
    output's device. It goes to Megatron's own autograd function, if that is loaded, to every submodule's
    `set_moe_loss_scale` or `set_mtp_loss_scale`, and to the config's function for its attention variant. Raises
    ValueError if a function returns more than one number.
    """
    one = torch.ones(1, device=_device_of(output))
    for field, kind, times_cp, module, name in _AUXILIARY:
        if setting(config, field) is None:
            continue
        function = setting(config, f"{kind}_grad_scale_func") or setting(config, "grad_scale_func")
        scale = one if function is None else torch.as_tensor(function(one), device=one.device)
        if scale.numel() != 1:
            message = f"the {kind} loss has one scale, and its function returned {scale.numel()} numbers"
            raise LossScaleError(Problem("PP-E725", message, f"{kind}_grad_scale_func=None"))
        if not setting(config, "calculate_per_token_loss", False):
            scale = scale * (cp if times_cp else 1) / num_microbatches
        # Never imported: a model that attaches such a loss has loaded its class.
        scaler = getattr(sys.modules.get(f"megatron.core.transformer.{module}"), name, None)
        setters = [getattr(each, f"set_{kind}_loss_scale", None) for each in getattr(model, "modules", tuple)()]
        setters += [getattr(scaler, "set_loss_scale", None), setting(config, f"{kind}_loss_scale_func")]
        for set_scale in filter(None, setters):
            set_scale(scale.clone())  # Megatron keeps the first tensor and copies later ones into it


def _device_of(output: Any) -> torch.device:
    first = output[0] if isinstance(output, list | tuple) and output else output
    return first.device if isinstance(first, Tensor) else torch.device("cpu")
