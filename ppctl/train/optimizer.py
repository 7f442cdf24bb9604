"""AdamW over parameters by canonical name, and the learning rate as a function of the step.

Knows which parameters decay and how the optimizer's state is named. Must not know stages, ranks or how gradients came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig, OptimConfig
from ppctl.model.names import is_decayed

State = dict[str, dict[str, Tensor]]
"""Canonical name -> {"step" (scalar), "exp_avg", "exp_avg_sq" (the parameter's shape)}, float32."""


def lr_at(step: int, optim: OptimConfig, steps: int) -> float:
    """The learning rate of optimizer step `step` (0-based) of `steps`: linear warm-up, then half a cosine to `min_lr`.

    lr x (step + 1) / warmup_steps while step < warmup_steps: no step is lost at rate 0. Then, with p = (step -
    warmup_steps) / (steps - warmup_steps), min_lr + (lr - min_lr) x (1 + cos(pi p)) / 2; from step `steps` on, min_lr.
    """
    if step < optim.warmup_steps:
        return optim.lr * ((step + 1) / optim.warmup_steps)
    if step >= steps:
        return optim.min_lr
    progress = (step - optim.warmup_steps) / (steps - optim.warmup_steps)
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(
    masters: Mapping[str, nn.Parameter],
    optim: OptimConfig,
    model: ModelConfig,
    *,
    wholes: Mapping[str, Tensor] | None = None,
) -> torch.optim.AdamW:
    """AdamW with two groups: matrices decay, norms, biases and embeddings (tied uses included) do not.

    The state exists from the start (zeros), so that a checkpoint can be loaded into it in place. A rank without
    parameters gets an optimizer whose step does nothing. `wholes` are the parameters that the masters are parts of,
    where they are.
    """
    dims = {name: p.dim() for name, p in (wholes or masters).items()}
    decayed = [p for name, p in masters.items() if is_decayed(name, dims[name], model)]
    spared = [p for name, p in masters.items() if not is_decayed(name, dims[name], model)]
    groups = [
        {"params": decayed, "weight_decay": optim.weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=(optim.beta1, optim.beta2), eps=optim.eps)
    for parameter in masters.values():
        optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Let the next step run at this rate."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def state_by_name(optimizer: torch.optim.Optimizer, masters: Mapping[str, nn.Parameter]) -> State:
    """The optimizer's state by canonical name: its own tensors, to be saved, or to be loaded into in place."""
    return {name: dict(optimizer.state[parameter]) for name, parameter in masters.items()}
