"""Which part of every parameter a rank holds: its places on the axes that split parameters, and slices of rows.

An axis splits a dim into neighbouring runs, equal but for the last ones: a vocabulary needs no padding to be divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ppctl.geometry.rows import Parameter


class Place(NamedTuple):
    """One of `size` ranks along an axis."""

    rank: int = 0
    size: int = 1

    def run(self, count: int) -> range:
        """The rank's run of `count` neighbouring elements; the runs of the last ranks may be shorter, or empty."""
        step = -(-count // self.size)
        return range(min(self.rank * step, count), min((self.rank + 1) * step, count))


ONLY = Place()


class Parts(NamedTuple):
    """The places of a rank on the axes that split parameters (`Parameter.splits`), and sequences."""

    tp: Place = ONLY
    ep: Place = ONLY
    etp: Place = ONLY
    cp: Place = ONLY
    """Splits no parameter, but sequences."""

    @classmethod
    def at(cls, position: Mapping[str, int], sizes: object) -> Parts:
        """The parts of a rank at this position on the axes of both views; `sizes` has the axes' sizes."""
        return cls(*(Place(position[axis], getattr(sizes, axis)) for axis in cls._fields))

    def on(self, axis: str) -> Place:
        """The place on an axis by its name."""
        place: Place = getattr(self, axis)
        return place

    def experts(self, count: int) -> range:
        """Which of `count` routed experts the rank holds."""
        return self.ep.run(count)

    def runs(self, row: Parameter) -> tuple[range, ...]:
        """The run of each dim of a row's tensor that the rank holds, the stack of experts included."""
        shape = (row.experts, *row.shape) if row.experts else row.shape
        runs = [range(size) for size in shape]
        for axis, dim in self.splits(row).items():
            runs[dim] = self.on(axis).run(shape[dim])
        return tuple(runs)

    def splits(self, row: Parameter) -> Mapping[str, int]:
        """Axis -> dim, of the axes that have several ranks here and split the row."""
        return {axis: dim for axis, dim in row.splits if self.on(axis).size > 1 and row.splits_over(self.on(axis).size)}

    def shape(self, row: Parameter) -> tuple[int, ...]:
        """Return the shape of the part of a parameter that the rank holds."""
        return tuple(len(run) for run in self.runs(row))

    def slices(self, row: Parameter) -> tuple[slice, ...]:
        """Slices of the tensor of one name that the rank holds: of one expert, or of a parameter without experts."""
        return tuple(slice(run.start, run.stop) for run in self.runs(row)[bool(row.experts) :])


WHOLE = Parts()
"""Everything: one rank on every axis."""


def tp_sums(row: Parameter, tp: int, *, sequence_parallel: bool) -> bool:
    """Whether tensor-parallel ranks have parts of the row's gradient, to be summed over tp once a step."""
    if tp == 1 or row.gradient == "none":
        return False
    return row.gradient == "heads" or (row.gradient == "tokens" and sequence_parallel) or not row.splits_over(tp)
