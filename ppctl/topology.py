"""Ranks are positions of one named grid; groups are its slices. Also the size of what a group sends at once.

Knows the parallel sizes and Megatron's rank order. Must not know torch, configs or schedules. No other module does
arithmetic on global ranks across axes. Standard library only.

One world has two views that share the pp axis: the dense one (tp, cp, dp, pp) and the expert one (etp, ep, edp, pp),
with tp x cp x dp = etp x ep x edp. Ranks count with the leftmost axis fastest, as in Megatron's default order
`tp-cp-ep-dp-pp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain, product
from math import prod

from ppctl.errors import ConfigError, Problem

VIEWS = {"dense": ("tp", "cp", "dp", "pp"), "expert": ("etp", "ep", "edp", "pp")}
"""Axes of each view, fastest first."""

BUCKET_ELEMENTS = 32 * 1024 * 1024
"""What the ranks of a data-parallel group send each other at once, unless one tensor is larger: bounds the copies."""


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks there are and how each axis divides them. Raises ConfigError unless they make up the world."""

    world: int
    pp: int = 1
    vpp: int = 1
    """Stages (chunks) per pp_rank; not an axis of the grid."""
    tp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    etp: int = 1
    edp: int = 1

    def __post_init__(self) -> None:
        problems = [
            Problem("PP-E201", f"{name} is {size}; every parallel size is at least 1", f"{name}=1")
            for name in (each.name for each in fields(self))
            if (size := getattr(self, name)) < 1
        ]
        for axes in VIEWS.values():
            if not problems and self.world != prod(getattr(self, axis) for axis in axes):
                factors = " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)
                problems.append(Problem("PP-E202", f"world {self.world} is not {factors}"))
        if problems:
            raise ConfigError(problems)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: pp x vpp."""
        return self.pp * self.vpp


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Where every global rank stands, in both views."""

    sizes: ParallelSizes

    def coordinates(self, rank: int, view: str = "dense") -> dict[str, int]:
        """The position of `rank` on each axis of a view. Raises IndexError for a rank outside the world."""
        if not 0 <= rank < self.sizes.world:
            raise IndexError(f"rank {rank} is outside a world of {self.sizes.world}")
        position: dict[str, int] = {}
        for axis in VIEWS[view]:
            rank, position[axis] = divmod(rank, getattr(self.sizes, axis))
        return position

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups along an axis, or along several of one view, sorted by their first rank.

        Each is in order of its axis; along several, the first one's places count fastest.
        """
        steps = [self._stride(axis) for axis in axes]
        offsets = self._offsets(steps)
        return [
            tuple(first + offset for offset in offsets)
            for first in range(self.sizes.world)
            if all(first // stride % size == 0 for stride, size in steps)
        ]

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group along an axis that holds `rank`."""
        steps = [self._stride(axis)]
        first = rank - sum(rank // stride % size * stride for stride, size in steps)
        return tuple(first + offset for offset in self._offsets(steps))

    def has_first_copy(self, rank: int) -> bool:
        """Whether `rank` holds the first copy of each of its parameters.

        Experts that are spread over ranks are not all on the first data-parallel rank.
        """
        return self.coordinates(rank, "expert")["edp"] == 0

    @staticmethod
    def _offsets(steps: Sequence[tuple[int, int]]) -> list[int]:
        """Distances of a group's ranks from its first one."""
        return [sum(place) for place in product(*(range(0, stride * size, stride) for stride, size in reversed(steps)))]

    def _stride(self, axis: str) -> tuple[int, int]:
        """Distance between neighbours on an axis, and the axis' size. Raises KeyError for an unknown axis."""
        axes = next((axes for axes in VIEWS.values() if axis in axes), None)
        if axes is None:
            raise KeyError(f"unknown axis {axis!r}: the grid has {', '.join(dict.fromkeys(chain(*VIEWS.values())))}")
        faster = axes[: axes.index(axis)]
        return prod(getattr(self.sizes, name) for name in faster), getattr(self.sizes, axis)


def levels(ranks: Sequence[int], inner: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """A group's ranks in groups of `inner` neighbours, and across these: the levels of a hierarchical exchange."""
    neighbours = [tuple(ranks[first : first + inner]) for first in range(0, len(ranks), inner)]
    return neighbours, list(zip(*neighbours, strict=True))
