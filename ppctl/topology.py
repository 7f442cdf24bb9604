"""Ranks are positions of one named grid; groups are its slices. Also the size of what a group sends at once.

No other module does arithmetic on global ranks across axes.

One world has two views that share the pp axis: the dense view (tp, cp, dp, pp) and the expert view (etp, ep, edp, pp),
with tp x cp x dp = etp x ep x edp. Ranks count with the leftmost axis of an order fastest. One order makes both views,
as in Megatron's RankGenerator: the dense view leaves ep out; the expert view leaves cp out, and has etp and edp in
place of tp and dp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from itertools import chain, combinations, product
from math import prod

from ppctl.errors import ConfigError, Problem

ORDER = "tp-cp-ep-dp-pp"
"""Megatron's default: tensor-parallel ranks are neighbours, pipelines are as far apart as they can be."""

RINGS = ("dp", "cp-dp", "edp")
"""Axes whose groups grow with the world: their ranks connect on first use, and a step's messages go round a ring."""

BUCKET_ELEMENTS = 32 * 1024 * 1024
"""Elements that a data-parallel group sends together, unless one tensor has more: this bounds the copies."""


def axes_of(order: str) -> tuple[str, ...]:
    """The axes that an order names, fastest first. Raises ValueError unless these are tp, cp, ep, dp and pp."""
    axes = tuple(order.split("-"))
    if sorted(axes) != sorted(ORDER.split("-")):
        raise ValueError(f"{order!r} is no order of the axes {ORDER}")
    return axes


@cache
def views(order: str = ORDER) -> dict[str, tuple[str, ...]]:
    """The axes of the `dense` and of the `expert` view, fastest first. Raises ValueError for an invalid order."""
    axes, names = axes_of(order), {"tp": "etp", "dp": "edp"}
    return {
        "dense": tuple(axis for axis in axes if axis != "ep"),
        "expert": tuple(names.get(axis, axis) for axis in axes if axis != "cp"),
    }


@dataclass(frozen=True, slots=True)
class ParallelSizes:
    """How many ranks there are and how each axis divides them. Raises ConfigError unless they make up the world, and
    ValueError for an invalid order."""

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
    order: str = ORDER
    """The order of the axes among the ranks, fastest first."""

    def __post_init__(self) -> None:
        problems = [
            Problem("PP-E201", f"{name} is {size}, but every parallel size must be at least 1", f"{name}=1")
            for name in (each.name for each in fields(self) if each.name != "order")
            if (size := getattr(self, name)) < 1
        ]
        for axes in views(self.order).values():
            if not problems and self.world != prod(getattr(self, axis) for axis in axes):
                factors = " x ".join(f"{axis} {getattr(self, axis)}" for axis in axes)
                problems.append(Problem("PP-E202", f"world {self.world} is not {factors}"))
        if problems:
            raise ConfigError(problems)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline: pp x vpp."""
        return self.pp * self.vpp

    def stride(self, axis: str) -> int:
        """Distance between neighbours on an axis. Raises KeyError for an unknown axis."""
        return prod(getattr(self, name) for name in self._faster(axis))

    def crosses(self, axis: str, ranks_per_node: int) -> bool:
        """Whether some group along an axis has ranks on several nodes, each of which holds neighbouring ranks."""
        return getattr(self, axis) > 1 and self.nodes_along(axis, ranks_per_node) != 1

    def nodes_along(self, axis: str, ranks_per_node: int) -> int | None:
        """How many nodes each group along `axis` spans, if groups have equally many ranks on each node; else None."""
        size, stride = getattr(self, axis), self.stride(axis)
        # consecutive ranks that hold whole groups: a node boundary inside them also divides a group
        block = stride * size
        if self.within(block, ranks_per_node):
            return 1
        if stride >= ranks_per_node:
            return int(size)
        return block // ranks_per_node if block % ranks_per_node == 0 and ranks_per_node % stride == 0 else None

    def block(self, *axes: str) -> int:
        """How many consecutive ranks hold whole groups along these axes of one view."""
        return max((self.stride(axis) * getattr(self, axis) for axis in axes if getattr(self, axis) > 1), default=1)

    def within(self, block: int, ranks_per_node: int) -> bool:
        """Whether no block of so many consecutive ranks is on several nodes."""
        return self.world <= ranks_per_node or ranks_per_node % block == 0

    @property
    def pipeline_strides(self) -> tuple[int, ...]:
        """How far apart neighbours of a pipeline are in each view; equal if pp is the last axis of the order."""
        return tuple(prod(getattr(self, name) for name in axes[: axes.index("pp")]) for axes in self._views)

    @property
    def _views(self) -> tuple[tuple[str, ...], ...]:
        return tuple(views(self.order).values())

    def _faster(self, axis: str) -> tuple[str, ...]:
        axes = next((axes for axes in self._views if axis in axes), None)
        if axes is None:
            raise KeyError(f"unknown axis {axis!r}: the grid has {', '.join(dict.fromkeys(chain(*self._views)))}")
        return axes[: axes.index(axis)]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """The position of every global rank, in both views."""

    sizes: ParallelSizes

    def coordinates(self, rank: int, view: str = "dense") -> dict[str, int]:
        """The position of `rank` on each axis of a view. Raises IndexError for a rank outside the world."""
        if not 0 <= rank < self.sizes.world:
            raise IndexError(f"rank {rank} is outside a world of {self.sizes.world}")
        position: dict[str, int] = {}
        for axis in views(self.sizes.order)[view]:
            rank, position[axis] = divmod(rank, getattr(self.sizes, axis))
        return position

    def groups(self, *axes: str) -> list[tuple[int, ...]]:
        """All groups along an axis, or along several of one view, sorted by their first rank. Each is in rank order,
        the order of its axis."""
        steps = [(self.sizes.stride(axis), getattr(self.sizes, axis)) for axis in axes]
        places = product(*(range(0, stride * size, stride) for stride, size in steps))
        offsets = sorted(map(sum, places))
        return [
            tuple(first + offset for offset in offsets)
            for first in range(self.sizes.world)
            if all(first // stride % size == 0 for stride, size in steps)
        ]

    def group_of(self, axis: str, rank: int) -> tuple[int, ...]:
        """The group along an axis that holds `rank`."""
        stride, size = self.sizes.stride(axis), getattr(self.sizes, axis)
        first = rank - rank // stride % size * stride
        return tuple(range(first, first + stride * size, stride))


def pairs_with_messages(sizes: ParallelSizes) -> Iterator[tuple[int, int]]:
    """Pairs of ranks that exchange messages along axes: any two of a group, but along RINGS only neighbours in the
    ring. A pair may come several times."""
    grid = RankGrid(sizes)
    for axes in axes_with_groups(sizes, experts=True):
        for group in grid.groups(*axes.split("-")):
            yield from zip(group, group[1:] + group[:1], strict=True) if axes in RINGS else combinations(group, 2)


def axes_with_groups(sizes: ParallelSizes, *, experts: bool) -> list[str]:
    """The axes along which every rank of a run has a group, in the order in which all ranks make them.

    `cp-dp` is along both. `experts`: whether the model has experts. pp and dp are included at any size.
    """
    divided = [axis for axis in ("tp", "cp", *("ep", "etp") * experts) if getattr(sizes, axis) > 1]
    experts_apart = experts and bool(divided)
    return ["pp", "dp", *divided, *["cp-dp"] * (sizes.cp > 1), *["edp"] * experts_apart]


def levels(ranks: Sequence[int], inner: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """A group's ranks in groups of `inner` neighbours, and across these: the levels of a hierarchical exchange."""
    neighbours = [tuple(ranks[first : first + inner]) for first in range(0, len(ranks), inner)]
    return neighbours, list(zip(*neighbours, strict=True))
