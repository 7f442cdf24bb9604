"""The global gradient norm and clipping, bitwise as `torch.nn.utils.clip_grad_norm_` has them on one process.

Knows the canonical order of the whole model's parameters and which pp_rank holds each. Must not know the schedule, nor
data-parallel replicas: their gradients are equal by now.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import canonical_names, owner_of, parameter_of
from ppctl.plan import StageSpec


class Held(NamedTuple):
    """A parameter of the model and where it lives."""

    name: str
    stage: int
    pp_rank: int


@dataclass(frozen=True)
class GradNorm:
    """One step's norms. Reading a number from it waits for the device; clipping does not."""

    total: Tensor
    """The global norm (float32 scalar)."""
    norms: Tensor
    """Norm of each of `parameters` (float32 [n])."""
    parameters: tuple[Held, ...]
    """The whole model's parameters in canonical order, tied ones once."""

    def item(self) -> float:
        """The global norm as a number."""
        return float(self.total)

    def culprits(self) -> tuple[Held, ...]:
        """The parameters whose own norm is not finite, earliest first; none if only the total overflows."""
        finite = [math.isfinite(norm) for norm in self.norms.tolist()]
        return tuple(held for held, fine in zip(self.parameters, finite, strict=True) if not fine)


class GradientNorm:
    """Takes the norm over the parameters of all pp_ranks, in one `all_gather` of a flat vector.

    `group` holds one rank per pp_rank, in order (None: one rank has all the stages). Every rank of it must call, also
    one without parameters. A tied parameter counts once, as its owner: all uses hold the summed gradient by then. Of a
    layer's experts each rank of `expert_group` holds a part (None: all of them); where all gradients are held in parts,
    the ranks of `part_group` have them.
    """

    def __init__(
        self,
        stages: Iterable[StageSpec],
        model: ModelConfig,
        *,
        device: torch.device | str,
        group: dist.ProcessGroup | None = None,
        expert_group: dist.ProcessGroup | None = None,
        part_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.parameters = tuple(
            Held(name, spec.stage, spec.pp_rank)
            for spec in stages
            for name in canonical_names(model, spec.layers)
            if owner_of(name, model) == name
        )
        self.device = torch.device(device)
        self.group = group
        self.expert_group = expert_group
        self.part_group = part_group
        own = group.rank() if group is not None else None
        by_rank: dict[int, list[str]] = {}
        for held in self.parameters:
            by_rank.setdefault(held.pp_rank if group is not None else 0, []).append(held.name)
        self.own_names = tuple(by_rank.get(own or 0, ()))
        self.own_experts = [i for i, name in enumerate(self.own_names) if parameter_of(name, model).experts]
        self.width = max(len(names) for names in by_rank.values())
        position = {name: rank * self.width + i for rank, names in by_rank.items() for i, name in enumerate(names)}
        # Where each parameter, in canonical order, stands in the gathered ranks' vectors.
        self.places = torch.tensor([position[held.name] for held in self.parameters], device=self.device)

    @torch.no_grad()
    def measure(self, masters: Mapping[str, nn.Parameter]) -> GradNorm:
        """The norm of the accumulated gradients. A parameter that received none counts as 0."""
        zero = torch.zeros((), device=self.device)
        gradients = [masters[name].grad for name in self.own_names]
        own = [zero if gradient is None else torch.linalg.vector_norm(gradient) for gradient in gradients]
        flat = torch.stack(own + [zero] * (self.width - len(own)))
        if self.part_group is not None:
            flat = _together(flat, self.part_group)
        elif self.expert_group is not None and self.own_experts:
            flat[self.own_experts] = _together(flat[self.own_experts], self.expert_group)
        if self.group is not None:
            rows = [torch.empty_like(flat) for _ in range(self.group.size())]
            dist.all_gather(rows, flat, group=self.group)
            flat = torch.cat(rows)
        norms = flat[self.places]
        return GradNorm(torch.linalg.vector_norm(norms), norms, self.parameters)


def _together(norms: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The norms of what the ranks of a group hold parts of."""
    squares = norms.square()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


def clip_gradients(masters: Mapping[str, nn.Parameter], norm: GradNorm, max_norm: float) -> None:
    """Scale this rank's gradients, all uses of a tied one included, by min(1, max_norm / (norm + 1e-6)).

    `max_norm` 0 leaves them alone. The formula is torch's own `clip_grads_with_norm_`.
    """
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(masters.values(), max_norm, norm.total)
