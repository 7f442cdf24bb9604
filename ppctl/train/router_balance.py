"""Once a step, for the routers of a rank: the weight of their auxiliary losses, the sum of these, a step of the biases.

Knows routers' ledgers and a process group. Must not know stages, the schedule or how a router routes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, islice

import torch

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import routers_with_losses
from ppctl.model.router import Router
from ppctl.parallel.tensor import SharedTokens
from ppctl.plan import StageSpec


class RouterBalance:
    """Keeps the load of the experts in this rank's layers even.

    `others` are the ranks that route other tokens through the same layers, `weight` the factor of an auxiliary loss in
    the objective.
    """

    def __init__(self, routers: Sequence[Router], model: ModelConfig, *, weight: float, others: SharedTokens) -> None:
        self.routers = tuple(routers)
        self.rate = model.moe_router_bias_update_rate if model.moe_router_enable_expert_bias else 0.0
        self.weight = weight
        self.others = others

    def begin(self, loss_scale: float) -> None:
        """Forget the last step; the objective of the next one is multiplied with `loss_scale`."""
        for router in self.routers:
            router.ledger.clear()
            router.ledger.scale = self.weight * loss_scale

    def losses(self) -> list[float]:
        """The auxiliary losses of each router's layer, summed over this rank's microbatches; exact, in any order."""
        ledgers = [router.ledger.losses for router in self.routers if router.ledger.losses]
        if not ledgers:
            return []
        numbers = iter(torch.stack([*chain.from_iterable(ledgers)]).tolist())  # waits for the device once
        return [math.fsum(islice(numbers, len(losses))) for losses in ledgers]

    @torch.no_grad()
    def move_biases(self) -> None:
        """Raise the bias of experts that had fewer tokens than the mean, lower that of those with more, by one rate.

        Tokens are counted over the step's microbatches of all ranks. A collective of these.
        """
        if not (self.rate and self.routers):
            return
        counts = torch.stack([router.counts_of_step() for router in self.routers])
        self.others.sum(counts)
        loads = counts.float()
        for router, step in zip(self.routers, (loads.mean(-1, keepdim=True) - loads).sign(), strict=True):
            assert router.expert_bias is not None
            router.expert_bias += self.rate * step


def auxiliary_width(stages: Sequence[Sequence[StageSpec]], model: ModelConfig) -> int:
    """The most routers with auxiliary losses that a rank has; `stages` are the stages of each rank."""
    return max(sum(routers_with_losses(model, spec.layers) for spec in own) for own in stages)
