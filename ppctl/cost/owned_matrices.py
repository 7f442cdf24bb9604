"""Elements of the matrices that Muon moves on one rank and, under sharding, on the one that owns most (decision 67)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.parameter_counts import Count, held, hidden_matrices, on_device
from ppctl.geometry.layers import Layer
from ppctl.geometry.matrix_owners import Matrices, deal
from ppctl.topology import ParallelSizes


class Orthogonalised(NamedTuple):
    """The matrices of a pp_rank that Muon moves."""

    elements: Count
    """The matrices' elements, over all ranks."""
    dense: int = 0
    """Elements of dense matrices that the rank that owns most has."""
    experts: int = 0
    """Elements of experts' matrices that the rank that owns most has."""
    operations: int = 0
    """Operations of one step of the iteration, on the rank with the most."""

    def on(self, sizes: ParallelSizes) -> tuple[int, int]:
        """(dense elements, experts' elements) on one device, before sharding."""
        return on_device(self.elements, sizes)

    @property
    def owned(self) -> int:
        """Elements of the matrices, dense and experts', of the rank that owns most."""
        return self.dense + self.experts


def orthogonalised(
    model: ModelConfig, stages: Iterable[Iterable[Layer]], sizes: ParallelSizes, *, shared: bool
) -> Orthogonalised:
    """The matrices of one rank's stages that Muon moves. Under sharding each is owned by one of the ranks that hold
    it."""
    rows = [row for layers in stages for row in hidden_matrices(model, layers)]
    count: Count = Counter()
    entries: dict[bool, list[Matrices]] = {False: [], True: []}
    for row, number in rows:
        count[row.axes] += number * row.elements
        one = Matrices(*row.shape[-2:])
        elements = number * held(row.elements, row.axes, sizes)
        entries[bool(row.experts)].append(one._replace(number=elements // one.size))
    if not any((sizes.tp > 1, sizes.cp > 1, sizes.ep > 1, sizes.etp > 1)):  # one group for both kinds
        entries = {False: entries[False] + entries[True], True: []}
    dense, operations = _most(tuple(entries[False]), sizes.dp * sizes.cp if shared else 1)
    experts, more = _most(tuple(entries[True]), sizes.edp if shared else 1)
    return Orthogonalised(count, dense, experts, operations + more)


def iteration_bytes(
    model: ModelConfig, stages: Iterable[Iterable[Layer]], sizes: ParallelSizes, gradient: int, limit: int
) -> int:
    """The most bytes beside the state while matrices go through the iteration, `limit` elements of one shape at once.
    First what is made orthogonal of all, in bfloat16, and of one stack as wide as a gradient; then that, two steps'
    results and two squares of the shorter side."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, number in (row for layers in stages for row in hidden_matrices(model, layers)):
        of_stack = held(row.elements, row.axes, sizes)
        alike.setdefault(row.shape[-2:], []).extend([of_stack] * number)
    most = 0
    for shape, stacks in alike.items():
        small, large = sorted(shape)
        one = small * large
        together, stack = (min(elements, max(limit, one)) for elements in (sum(stacks), max(stacks)))
        most = max(most, 2 * together + gradient * stack, 6 * together + 4 * together * small // large)
    return most


@cache
def _most(entries: tuple[Matrices, ...], ranks: int) -> tuple[int, int]:
    """(elements, operations) of the ranks with most of each."""
    elements, operations = [0] * ranks, [0] * ranks
    for matrices, owned in zip(entries, deal(entries, ranks), strict=True):
        for rank, number in enumerate(owned):
            elements[rank] += number * matrices.size
            operations[rank] += number * matrices.operations
    return max(elements), max(operations)
