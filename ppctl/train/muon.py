"""Muon for the matrices of hidden layers, AdamW for all other parameters (decision 61).

Knows which parameters are orthogonalised, one by one of a stack of experts, and how the state is named. Must not know
stages, ranks or how gradients came. Matrices are whole here: nothing splits them (`config/muon_rules.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from ppctl.config.schema import OptimConfig
from ppctl.geometry.rows import Parameter
from ppctl.train.optimizer import AdamW, State

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Keller Jordan's coefficients, torch's default."""
EPS = 1e-7


class Muon:
    """torch's Muon, called by its functional form, beside `AdamW` over what it is not for.

    Of a matrix the state is one momentum buffer and the count of updates, which AdamW's parameters have as well. On a
    GPU the host does not wait: one matrix after another is a chain of kernels on the current stream.
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], optim: OptimConfig, rows: Mapping[str, Parameter]) -> None:
        self.optim = optim
        self.lr = optim.lr
        self.matrices = {name: master for name, master in masters.items() if rows[name].hidden_matrix}
        rest = {name: master for name, master in masters.items() if name not in self.matrices}
        self.adamw = AdamW(rest, optim, rows)
        own: State = {
            name: {"step": torch.tensor(0.0), "momentum_buffer": torch.zeros_like(master)}
            for name, master in self.matrices.items()
        }
        both = own | self.adamw.state
        self.state: State = {name: both[name] for name in masters}

    @property
    def updates(self) -> int:
        """How many updates were made, those before a checkpoint included; 0 for a rank without parameters."""
        return max((int(entry["step"]) for entry in self.state.values()), default=0)

    @torch.no_grad()
    def step(self) -> None:
        """Move every parameter that has a gradient."""
        from torch.optim._muon import muon  # few runs need it

        self.adamw.lr = self.lr
        self.adamw.step()
        optim = self.optim
        for name, master in self.matrices.items():
            if master.grad is None:
                continue
            entry = self.state[name]
            for matrix, gradient, momentum in _one_by_one(master.data, master.grad, entry["momentum_buffer"]):
                muon(
                    [matrix],
                    [gradient],
                    [momentum],
                    foreach=False,
                    lr=self.lr,
                    weight_decay=optim.weight_decay,
                    momentum=optim.muon_momentum,
                    nesterov=optim.muon_nesterov,
                    ns_coefficients=NEWTON_SCHULZ,
                    ns_steps=optim.muon_ns_steps,
                    eps=EPS,
                    adjust_lr_fn=optim.muon_adjust_lr,
                    has_complex=False,
                )
            entry["step"] += 1


def _one_by_one(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The matrices of stacks [experts, rows, columns], as views; of a matrix itself."""
    if tensors[0].dim() == 2:
        yield tensors
    else:
        yield from zip(*(tensor.unbind() for tensor in tensors), strict=True)


def make_optimizer(
    masters: Mapping[str, nn.Parameter], optim: OptimConfig, rows: Mapping[str, Parameter]
) -> AdamW | Muon:
    """The optimizer that the config names."""
    return (Muon if optim.name == "muon" else AdamW)(masters, optim, rows)
