"""One rank's process groups, by the axes of the grid along which they go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial

from torch.distributed import ProcessGroup

from ppctl.comm.groups import connecting_on_first_use, make_group
from ppctl.parallel.exchange_counts import watch
from ppctl.parallel.tensor import SharedTokens, TensorParallel
from ppctl.records.rank_records import EXCHANGING_AXES
from ppctl.topology import RINGS, ParallelSizes, RankGrid, axes_with_groups, levels

_LEVELS = ("inner", "outer")


class AxisGroups(dict[str, ProcessGroup]):
    """An axis, or several joined by `-` -> this rank's group along it; an axis of one rank may have none. With
    `sequence_parallel`, ranks along tp have tokens of their own between the products that they divide."""

    sequence_parallel: bool = False

    @classmethod
    def make(
        cls, sizes: ParallelSizes, rank: int, *, experts: bool, sequence_parallel: bool, inner: Mapping[str, int]
    ) -> AxisGroups:
        """Make the groups. A collective: all ranks of the world make them in one order. `inner` has the number of ranks
        in the inner level of axes with two levels, in the same order everywhere; a level of one rank has no group."""
        grid = RankGrid(sizes)
        named = axes_with_groups(sizes, experts=experts)
        groups = cls()
        for axes in named:
            with connecting_on_first_use() if axes in RINGS else nullcontext():
                groups[axes] = make_group(grid.groups(*axes.split("-")))
        for axis, size in inner.items():
            both = levels(grid.group_of(axis, rank), size)
            made = {f"{axis}-{name}": level for name, level in zip(_LEVELS, both, strict=True) if len(level[0]) > 1}
            groups |= {name: make_group(level) for name, level in made.items()}
        groups.sequence_parallel = sequence_parallel
        return groups

    def count_exchanges(self, count: Callable[[str], None]) -> None:
        """From now on call `count(axis)` whenever an exchange along one of EXCHANGING_AXES starts."""
        divided = [f"{axis}-{level}" for axis in EXCHANGING_AXES for level in _LEVELS]
        counted = [name for name in (*EXCHANGING_AXES, *divided) if name in self]
        watch({self[name]: partial(count, name.partition("-")[0]) for name in counted})

    @property
    def world(self) -> list[ProcessGroup]:
        """The groups along the axes that make up the world: gathering over one after another reaches every rank."""
        return self._present("pp", "dp", "cp", "tp")

    @property
    def split(self) -> TensorParallel | None:
        """The ranks that divide weights with this one; None if tp is 1."""
        group = self.get("tp")
        return None if group is None else TensorParallel(group, sequence=self.sequence_parallel)

    @property
    def same_sequences(self) -> SharedTokens:
        """The ranks that have other tokens of the same sequences."""
        return SharedTokens(self._present(*["tp"] * self.sequence_parallel, "cp"))

    @property
    def other_tokens(self) -> SharedTokens:
        """The ranks that route other tokens of a step through the same layers."""
        groups = self._present(*["tp"] * self.sequence_parallel, "cp", "dp")
        return SharedTokens([group for group in groups if group.size() > 1])

    def exchanges(self, cp_comm_type: str | Iterable[str], *, whole_rings: bool = False) -> dict[str, list[str]]:
        """Axis -> the exchanges of its ranks other than collectives (`reach/first_contact.py`). With `whole_rings` any
        two ranks of a group in RINGS exchange messages."""
        ways = {cp_comm_type} if isinstance(cp_comm_type, str) else set(cp_comm_type)
        exchanges: dict[str, list[str]] = {
            "ep": ["all to all"],
            "ep-inner": ["all to all"],
            "ep-outer": ["all to all"],
            "etp": ["all to all"],
            "cp": ["round"] * ("p2p" in ways) + ["all to all"] * ("a2a" in ways),
            "cp-inner": ["all to all"],
            "cp-outer": ["round"],
        }
        exchanges |= {axis: ["all to all"] * whole_rings for axis in RINGS}
        return {axis: exchanges[axis] for axis in exchanges if axis in self}

    def _present(self, *axes: str) -> list[ProcessGroup]:
        return [self[axis] for axis in axes if axis in self]
