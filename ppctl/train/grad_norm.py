"""The global gradient norm and clipping, bitwise as torch's `clip_grad_norm_` in one process on equal gradients."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import canonical_names, owner_of
from ppctl.geometry.foreign_model import foreign_of
from ppctl.plan import StageSpec


class Location(NamedTuple):
    """A parameter of the model and where it is trained."""

    name: str
    stage: int
    pp_rank: int


def locate_parameters(stages: Iterable[StageSpec], model: ModelConfig) -> list[Location]:
    """All parameters in the model's order, the order in which a norm is summed; a tied one once, where its owner is."""
    locations = [
        Location(name, spec.stage, spec.pp_rank)
        for spec in stages
        for name in canonical_names(model, spec.layers)
        if owner_of(name, model) == name
    ]
    foreign = foreign_of(model)
    return locations if foreign is None else sorted(locations, key=lambda each: foreign.anatomy.place(each.name))


@dataclass(frozen=True)
class GradNorm:
    """One step's norms. `culprits` waits for the device; clipping does not."""

    total: Tensor
    """The global norm (scalar)."""
    norms: Tensor
    """Norm of each of `parameters` ([n])."""
    parameters: tuple[Location, ...]
    """The parameters of the model in canonical order, shared ones once."""

    def culprits(self) -> tuple[Location, ...]:
        """The parameters whose own norm is not finite, earliest first; none if only the total overflows."""
        finite = [math.isfinite(norm) for norm in self.norms.tolist()]
        return tuple(each for each, fine in zip(self.parameters, finite, strict=True) if not fine)


class GradientNorm:
    """Takes the norm over the parameters of all pp_ranks, in one `all_gather` of a flat vector.

    `parameters` are the parameters of the whole model, the same on every rank. `group` holds one rank per pp_rank, in
    order (None: one rank has all the stages). All ranks of the group must call `measure`, also those without
    parameters. A shared parameter counts once, with its owner: all uses hold the summed gradient. `parts` are (names,
    group): each rank of the group has a part of the gradients of these parameters; a parameter that several groups
    divide is in each. `dtype` is the dtype of gradients, which a rank without parameters cannot see.
    """

    def __init__(
        self,
        parameters: Iterable[Location],
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        group: dist.ProcessGroup | None = None,
        parts: Iterable[tuple[Container[str], dist.ProcessGroup]] = (),
    ) -> None:
        self.parameters = tuple(parameters)
        self.device, self.dtype = torch.device(device), dtype
        self.group = group
        by_rank: dict[int, list[str]] = {}
        for each in self.parameters:
            by_rank.setdefault(each.pp_rank if group is not None else 0, []).append(each.name)
        self.own_names = tuple(by_rank.get(0 if group is None else group.rank(), ()))
        self.parts = [(self._places_of(names), shared) for names, shared in parts]
        self.width = max(len(names) for names in by_rank.values())
        position = {name: rank * self.width + i for rank, names in by_rank.items() for i, name in enumerate(names)}
        # The index of each parameter, in canonical order, in the gathered vectors of the ranks.
        self.places = torch.tensor([position[each.name] for each in self.parameters], device=self.device)

    @torch.no_grad()
    def measure(self, masters: Mapping[str, nn.Parameter]) -> GradNorm:
        """The norm of the accumulated gradients. A parameter without a gradient counts as 0. A collective."""
        zero = torch.zeros((), dtype=self.dtype, device=self.device)
        gradients = [masters[name].grad for name in self.own_names]
        own = [zero if gradient is None else torch.linalg.vector_norm(gradient) for gradient in gradients]
        flat = torch.stack(own + [zero] * (self.width - len(own)))
        for places, shared in self.parts:
            if len(places):
                squares = flat[places].square()
                dist.all_reduce(squares, group=shared)
                flat[places] = squares.sqrt()
        if self.group is not None:
            rows = [torch.empty_like(flat) for _ in range(self.group.size())]
            dist.all_gather(rows, flat, group=self.group)
            flat = torch.cat(rows)
        norms = flat[self.places]
        return GradNorm(torch.linalg.vector_norm(norms), norms, self.parameters)

    def _places_of(self, names: Container[str]) -> Tensor:
        """The places of these names, on the device: indexing with the host's numbers would make the host wait."""
        places = [i for i, name in enumerate(self.own_names) if name in names]
        return torch.tensor(places, dtype=torch.int64, device=self.device)


def clip_gradients(masters: Mapping[str, nn.Parameter], norm: GradNorm, max_norm: float) -> None:
    """Scale this rank's gradients, all uses of a tied one included, by min(1, max_norm / (norm + 1e-6)), as torch's
    `clip_grads_with_norm_` does; `max_norm` 0 leaves them alone."""
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(masters.values(), max_norm, norm.total)
