"""Computing in a narrower dtype: autocast, and float16's loss scale, which all ranks adjust alike, by one norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ppctl.comm.buffers import Message
from ppctl.config.schema import OptimConfig
from ppctl.engine.stage import StageProgram

GROWTH = 2.0
"""The factor that raises a loss scale; its inverse lowers it. Powers of two scale without rounding."""


@dataclass(slots=True)
class LossScale:
    """The factor on the loss, and the state of its adjustment (Megatron's rule).

    A step whose gradients overflow is skipped and uses up one of `hysteresis` chances. The overflow that uses up the
    last chance, and each further one, halves the scale, down to `minimum`. `window` steps without overflow double the
    scale and restore all chances.
    """

    scale: float
    minimum: float
    window: int
    hysteresis: int
    fixed: bool = False
    good_steps: int = 0
    chances: int = 0

    @classmethod
    def of(cls, optim: OptimConfig) -> LossScale:
        """A run's first loss scale."""
        fixed = optim.loss_scale is not None
        scale = optim.initial_loss_scale if optim.loss_scale is None else optim.loss_scale
        return cls(scale, optim.min_loss_scale, optim.loss_scale_window, optim.hysteresis, fixed, 0, optim.hysteresis)

    @property
    def exhausted(self) -> bool:
        """Whether another overflow could not lower the scale."""
        return self.fixed or (self.chances <= 1 and self.scale <= self.minimum)

    def update(self, *, overflow: bool) -> None:
        """Adjust the scale after a step."""
        if self.fixed:
            return
        if overflow:
            self.good_steps, self.chances = 0, self.chances - 1
            if self.chances <= 0:
                self.scale = max(self.scale / GROWTH, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps >= self.window:  # a resume may have a smaller window
            self.scale, self.good_steps, self.chances = self.scale * GROWTH, 0, self.hysteresis

    def state(self) -> dict[str, float]:
        """The entries of this scale that a checkpoint saves, for `restore`."""
        return {"scale": self.scale, "good_steps": self.good_steps, "chances": self.chances}

    def restore(self, state: Mapping[str, float]) -> None:
        """Take the scale and the counters from a checkpoint's `state`; a fixed scale keeps its own."""
        if not self.fixed:
            self.scale = float(state["scale"])
            self.good_steps, self.chances = int(state["good_steps"]), int(state["chances"])


def in_precision(
    program: StageProgram, autocast: str | None, device: torch.device, scale: LossScale | None
) -> StageProgram:
    """The program under autocast to `autocast` (None: without), with its loss (if it has one) times the loss scale."""

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
