"""AdamW over parameters by canonical name.

Knows which parameters decay and how the optimizer's state is named. Must not know stages, ranks or how gradients came.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ppctl.config.schema import OptimConfig
from ppctl.geometry.rows import Parameter

State = dict[str, dict[str, Tensor]]
"""Canonical name -> {"step" (scalar, on the CPU), "exp_avg", "exp_avg_sq" (the parameter's shape and dtype)}."""


class AdamW:
    """torch's AdamW over `masters`, called by its functional form; matrices decay, as their `rows` say.

    torch.optim.Optimizer imports torch's compiler to keep it out of every step: a second of each rank's start. `lr` is
    the rate of the next step. A rank without parameters gets an optimizer whose step does nothing.

    On a GPU the kernel is the fused one: torch's default there makes a tensor of each group's whole size. On the CPU it
    is torch's default, parameter by parameter, whose bits the fused one does not have.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], optim: OptimConfig, rows: Mapping[str, Parameter]) -> None:
        self.masters = masters
        self.optim = optim
        self.lr = optim.lr
        self.fused = any(parameter.device.type != "cpu" for parameter in masters.values())
        decayed = [name for name in masters if rows[name].decayed]
        spared = [name for name in masters if not rows[name].decayed]
        self.groups = ((decayed, optim.weight_decay), (spared, 0.0))
        """(canonical names, their weight decay)."""
        # From the start, so that a checkpoint can be loaded into it in place.
        self.state: State = {
            name: {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
            for name, parameter in masters.items()
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
        """Move every parameter that has a gradient. The host does not wait for the device."""
        for names, weight_decay in self.groups:
            moved = [name for name in names if self.masters[name].grad is not None]
            for made, alike in _by_updates(moved, self.state).items():
                self._move(alike, made, weight_decay)

    def _move(self, names: list[str], made: float, weight_decay: float) -> None:
        """The update that follows `made` others, of parameters that have made as many."""
        masters: list[Tensor] = [self.masters[name] for name in names]
        state = [self.state[name] for name in names]
        # torch's kernels count in tensors beside the parameters. Ours are on the host, which reads them in every step.
        counts = torch.full((len(names),), made, dtype=torch.float32, device=masters[0].device)
        adamw(
            masters,
            [master.grad for master in masters if master.grad is not None],
            [entry["exp_avg"] for entry in state],
            [entry["exp_avg_sq"] for entry in state],
            [],
            list(counts.unbind()),
            foreach=False,
            fused=self.fused,
            amsgrad=False,
            beta1=self.optim.beta1,
            beta2=self.optim.beta2,
            lr=self.lr,
            weight_decay=weight_decay,
            eps=self.optim.eps,
            maximize=False,
        )
        for entry in state:
            entry["step"].fill_(made + 1)


def _by_updates(names: Iterable[str], state: State) -> dict[float, list[str]]:
    """The parameters by the number of updates they have made: one number, unless some had no gradient in a step."""
    alike: dict[float, list[str]] = {}
    for name in names:
        alike.setdefault(state[name]["step"].item(), []).append(name)
    return alike
