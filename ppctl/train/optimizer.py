"""AdamW over parameters by canonical name, and the learning rate as a function of the updates made.

Knows which parameters decay and how the optimizer's state is named. Must not know stages, ranks or how gradients came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ppctl.config.schema import OptimConfig
from ppctl.geometry.parameters import Parameter

State = dict[str, dict[str, Tensor]]
"""Canonical name -> {"step" (scalar), "exp_avg", "exp_avg_sq" (the parameter's shape)}, float32."""


def lr_at(updates: int, optim: OptimConfig, steps: int) -> float:
    """The learning rate of the update that follows `updates` others, of `steps` in all.

    A linear warm-up, lr x (u + 1) / warmup_steps while u = updates < warmup_steps: no update is lost at rate 0. Then
    half a cosine, min_lr + (lr - min_lr) x (1 + cos(pi p)) / 2 with p = (u - warmup_steps) / (steps - warmup_steps).
    From update `steps` on, min_lr.
    """
    if updates < optim.warmup_steps:
        return optim.lr * ((updates + 1) / optim.warmup_steps)
    if updates >= steps:
        return optim.min_lr
    progress = (updates - optim.warmup_steps) / (steps - optim.warmup_steps)
    return optim.min_lr + (optim.lr - optim.min_lr) * 0.5 * (1.0 + math.cos(math.pi * progress))


@dataclass(slots=True)
class Group:
    """Parameters with one weight decay; `lr` is set before every step."""

    parameters: list[nn.Parameter]
    weight_decay: float
    lr: float


class AdamW:
    """torch's AdamW, called by its functional form.

    torch.optim.Optimizer imports torch's compiler to keep it out of every step: a second of each rank's start.
    """

    def __init__(self, groups: Sequence[Group], betas: tuple[float, float], eps: float) -> None:
        self.groups = groups
        self.betas = betas
        self.eps = eps
        # From the start, so that a checkpoint can be loaded into it in place.
        self.state = {
            parameter: {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for group in groups
            for parameter in group.parameters
        }

    @property
    def updates(self) -> int:
        """How many updates were made, those before a checkpoint included; 0 for a rank without parameters.

        Every parameter keeps the count, which AdamW's bias correction needs: a step that is left out does not count.
        So it comes back with any checkpoint, in any cut.
        """
        return max((int(entry["step"]) for entry in self.state.values()), default=0)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        for group in self.groups:
            moved = [p for p in group.parameters if p.grad is not None]
            state = [self.state[p] for p in moved]
            adamw(
                list(moved),
                [p.grad for p in moved if p.grad is not None],
                [entry["exp_avg"] for entry in state],
                [entry["exp_avg_sq"] for entry in state],
                [],
                [entry["step"] for entry in state],
                amsgrad=False,
                beta1=self.betas[0],
                beta2=self.betas[1],
                lr=group.lr,
                weight_decay=group.weight_decay,
                eps=self.eps,
                maximize=False,
            )


def build_optimizer(masters: Mapping[str, nn.Parameter], optim: OptimConfig, rows: Mapping[str, Parameter]) -> AdamW:
    """AdamW with two groups: parameters whose row says that they decay (matrices), and all others.

    A rank without parameters gets an optimizer whose step does nothing.
    """
    decayed = [p for name, p in masters.items() if rows[name].decayed]
    spared = [p for name, p in masters.items() if not rows[name].decayed]
    groups = [Group(decayed, optim.weight_decay, optim.lr), Group(spared, 0.0, optim.lr)]
    return AdamW(groups, (optim.beta1, optim.beta2), optim.eps)


def set_lr(optimizer: AdamW, lr: float) -> None:
    """Let the next step run at this rate."""
    for group in optimizer.groups:
        group.lr = lr


def state_by_name(optimizer: AdamW, masters: Mapping[str, nn.Parameter]) -> State:
    """The optimizer's state by canonical name: its own tensors, to be saved, or to be loaded into in place."""
    return {name: dict(optimizer.state[parameter]) for name, parameter in masters.items()}
