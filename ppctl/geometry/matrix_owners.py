"""Which rank of a data-parallel group owns which matrix: Muon orthogonalises each matrix whole on one rank (decision
67)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple


class Matrices(NamedTuple):
    """Equal matrices side by side: a parameter, or the experts of a layer."""

    rows: int
    columns: int
    number: int = 1

    @property
    def size(self) -> int:
        """The number of elements of one matrix."""
        return self.rows * self.columns

    @property
    def operations(self) -> int:
        """FLOPs of one Newton-Schulz step: X Xt, its square, and their sum times X (Jordan 2024)."""
        small, large = sorted((self.rows, self.columns))
        return 4 * small * small * large + 2 * small**3


def deal(matrices: Sequence[Matrices], ranks: int) -> list[list[int]]:
    """For each entry, how many of its matrices each rank owns: longest processing time first (Graham 1969). The matrix
    with the most operations goes to the rank with the fewest so far; ties go to the earlier entry and the lower rank,
    so that every rank of a job finds the same."""
    owned = [[0] * ranks for _ in matrices]
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for entry in sorted(range(len(matrices)), key=lambda entry: -matrices[entry].operations):
        own = owned[entry]
        for _ in range(matrices[entry].number):
            load, rank = loads[0]
            heapreplace(loads, (load + matrices[entry].operations, rank))
            own[rank] += 1
    return owned


def owned_runs(shapes: Mapping[str, tuple[int, ...]], ranks: int) -> dict[str, dict[int, range]]:
    """Name -> rank of a group -> the elements that the rank owns, numbered in the flattened matrix or stack [number,
    rows, columns]. A stack's runs follow each other in the order of ranks; a rank that owns nothing is left out."""
    entries = [Matrices(*shape[-2:], *shape[:-2]) for shape in shapes.values()]
    runs: dict[str, dict[int, range]] = {}
    for name, entry, owned in zip(shapes, entries, deal(entries, ranks), strict=True):
        start, runs[name] = 0, {}
        for rank, number in enumerate(owned):
            if number:
                runs[name][rank] = range(start, start + number * entry.size)
                start = runs[name][rank].stop
    return runs
