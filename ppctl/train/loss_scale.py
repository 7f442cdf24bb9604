"""The loss scale of float16: a factor that keeps small gradients above the smallest float16, and its adjustment.

Must not know the optimizer, ranks or files: all ranks see the same norm, and so change their scale in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ppctl.config.schema import OptimConfig

GROWTH = 2.0
"""Factor upwards, and its inverse downwards: powers of two scale without rounding."""


@dataclass(slots=True)
class LossScale:
    """The factor on the loss, and the state of its adjustment (Megatron's rule).

    A step whose gradients overflow is left out and uses up one of `hysteresis` chances; from the last one on the scale
    is halved with each, down to `minimum`. `window` steps without overflow double it and give all chances back.
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
        """Take note of a step."""
        if self.fixed:
            return
        if overflow:
            self.good_steps, self.chances = 0, self.chances - 1
            if self.chances <= 0:
                self.scale = max(self.scale / GROWTH, self.minimum)
            return
        self.good_steps += 1
        if self.good_steps == self.window:
            self.scale, self.good_steps, self.chances = self.scale * GROWTH, 0, self.hysteresis

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "chances": self.chances}

    def restore(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint's; a fixed scale stays."""
        if not self.fixed:
            self.scale = float(state["scale"])
            self.good_steps, self.chances = int(state["good_steps"]), int(state["chances"])
