"""The gradients that a rank has accumulated."""

from __future__ import annotations

from torch import Tensor

from ppctl.train.trained_weights import Weights


def accumulated(weights: Weights) -> dict[str, Tensor]:
    """Gradients by canonical name, without the parameters that received none."""
    return {name: master.grad for name, master in weights.master.items() if master.grad is not None}
