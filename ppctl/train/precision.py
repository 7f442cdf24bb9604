"""The weights of one rank twice: as the model computes with them, and as the optimizer steps them.

Knows dtypes and accumulation of gradients. Must not know stages, the schedule or the optimizer's rule. In float32 and
float64 both are the same objects and nothing is done twice; otherwise masters are float32, and the master's `.grad` is
the accumulator (Megatron's main_grad). Replication, ties, norm, clipping, AdamW and checkpoints read masters only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ppctl.comm.buffers import Message
from ppctl.engine.stage import StageProgram
from ppctl.train.loss_scale import LossScale
from ppctl.wide_dtype import wide_dtype


class Weights:
    """A rank's parameters by canonical name: `model` (what stages compute with) and `master` (float32 or wider).

    Gradients arrive in `master[name].grad`, in microbatch order, whatever the dtype.
    """

    model: dict[str, nn.Parameter]
    master: dict[str, nn.Parameter]

    def __init__(self, model: Mapping[str, nn.Parameter]) -> None:
        self.model = dict(model)
        self.master = {name: _master(parameter) for name, parameter in model.items()}

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the model's parameters: after an optimizer step, and after loading a checkpoint."""
        for name, parameter in self.model.items():
            if parameter is not self.master[name]:
                parameter.copy_(self.master[name])

    def clear_gradients(self) -> None:
        """Forget all gradients, before the first microbatch of a step."""
        for parameter in (*self.model.values(), *self.master.values()):
            parameter.grad = None

    def run(self, name: str) -> range:
        """Which elements of the rank's parameter, read flat, its master and the master's moments are."""
        return range(self.model[name].numel())

    def gradients(self) -> dict[str, Tensor]:
        """The accumulated gradients by canonical name, without the parameters that received none."""
        return {name: master.grad for name, master in self.master.items() if master.grad is not None}


def in_precision(
    program: StageProgram, autocast: str | None, device: torch.device, scale: LossScale | None
) -> StageProgram:
    """The program, cast to `autocast` where that is a dtype, with its loss (if it has one) times the loss scale."""

    def forward(mb: int, inputs: Message) -> Message:
        if autocast is None:
            outputs = program.forward(mb, inputs)
        else:
            with torch.autocast(device.type, dtype=getattr(torch, autocast)):
                outputs = program.forward(mb, inputs)
        if scale is not None and not program.sends:
            outputs = tuple(loss * scale.scale for loss in outputs)
        return outputs

    return program if autocast is None and scale is None else replace(program, forward=forward)


@torch.no_grad()
def unscale(masters: Mapping[str, nn.Parameter], scale: LossScale | None) -> None:
    """Divide the gradients by the loss scale, if there is one."""
    for parameter in masters.values():
        if scale is not None and parameter.grad is not None:
            parameter.grad.div_(scale.scale)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.dtype == wide_dtype(parameter.dtype):
        return parameter
    master = nn.Parameter(parameter.detach().to(wide_dtype(parameter.dtype)))
    parameter.register_post_accumulate_grad_hook(partial(_accumulate, master))
    return master


def _accumulate(master: nn.Parameter, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        master.grad = add_wide(master.grad, gradient)


def add_wide(total: Tensor | None, gradient: Tensor) -> Tensor:
    """`total` with one microbatch's gradient added in place: `wide`, which keeps what bfloat16 would round away."""
    return gradient.to(wide_dtype(gradient.dtype)) if total is None else total.add_(gradient)
