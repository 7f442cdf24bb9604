"""Parameter counts, per layer, per stage and for the whole model: sums over the table of parameters.

Counts are kept apart by the parallel axes that split the parameters, so that a device's part follows from the sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import stage_rows
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import Kind, Layer, layer_kinds, mtp_is_moe
from ppctl.geometry.matrix_owners import Matrices, deal
from ppctl.geometry.parameters import Sizes, beside_layers, kind_parameters, mtp_embedding
from ppctl.geometry.rows import Parameter
from ppctl.topology import ParallelSizes

Axes = tuple[str, ...]

Count = Counter[Axes]
"""Numbers of parameters by the parallel axes that split them: `()` for norms, `("tp",)` for most matrices, `("tp/8",)`
for projections to 8 groups of keys, `("tp:37",)` for tables of 37 tokens, `("ep", "etp")` for experts'."""


_ONE_DEVICE = ParallelSizes(1)


@lru_cache(4096)
def held(elements: int, axes: Axes, sizes: ParallelSizes) -> int:
    """How many of `elements`, split over `axes`, are on one device: the largest part, if parts are uneven."""
    parts = [_part(axis, sizes) for axis in axes]
    return -(-elements * prod(own for own, _ in parts) // prod(all_ for _, all_ in parts))


def _part(axis: str, sizes: ParallelSizes) -> tuple[int, int]:
    """A device's share of what an axis splits, as (numerator, denominator): all of `tp/8` if tp does not divide 8; the
    first, largest run of `tp:37`."""
    name, kind, number = axis.partition("/") if "/" in axis else axis.partition(":")
    size: int = getattr(sizes, name)
    if kind == ":":
        return -(-int(number) // size), int(number)
    return 1, size if not kind or int(number) % size == 0 else 1


def on_device(count: Count, sizes: ParallelSizes) -> tuple[int, int]:
    """(dense parameters, experts' parameters) on one device, apart since their replicas are on different ranks. Of an
    uneven split the largest part counts."""
    dense = experts = 0
    for axes, number in count.items():
        own = held(number, axes, sizes)
        dense, experts = (dense, experts + own) if "ep" in axes else (dense + own, experts)
    return dense, experts


def _elements(rows: Iterable[Parameter], experts: int | None = None) -> int:
    """The number of the rows' parameters, with `experts` routed experts per layer (None: all)."""
    return sum(row.elements if experts is None or not row.experts else row.size * experts for row in rows)


def stage_count(model: ModelConfig, layers: Iterable[Layer]) -> Count:
    """Parameters that a stage builds, tied copies included: with MTP modules it builds a copy of the embedding."""
    count: Count = Counter()
    for row, number in stage_rows(model, layers):
        count[row.axes] += number * row.elements
    return count


def trained_count(model: ModelConfig, layers: Iterable[Layer]) -> Count:
    """Parameters of a stage that get a gradient: all but routers' biases and frozen weights (`untrained_bytes`)."""
    count: Count = Counter()
    for row, number in stage_rows(model, layers):
        count[row.axes] += number * row.elements * (row.gradient != "none")
    return count


def untrained_bytes(model: ModelConfig, layers: Iterable[Layer], *, weight: int, gradient: int) -> int:
    """Bytes of the parameters without a gradient: `weight` for each frozen weight, `gradient` for a router's bias."""
    return sum(
        (weight if row.frozen else gradient) * number * row.elements
        for row, number in stage_rows(model, layers)
        if row.gradient == "none"
    )


def largest_matrices(
    model: ModelConfig, layers: Iterable[Layer], sizes: ParallelSizes = _ONE_DEVICE
) -> tuple[int, int]:
    """(elements of a stage's largest dense tensor, of its largest stack of experts) on one device; 0 without one."""
    dense = experts = 0
    for row, _ in stage_rows(model, layers):
        own = held(row.elements, row.axes, sizes)
        dense, experts = (dense, max(experts, own)) if row.experts else (max(dense, own), experts)
    return dense, experts


def replicated_parameters(model: ModelConfig, layers: Iterable[Layer]) -> int:
    """Parameters of a stage that copy an earlier use: a tied output, the embedding that MTP reads."""
    return sum(row.elements for row, _ in stage_rows(model, layers) if row.copy_of is not None)


def total_parameters(model: ModelConfig) -> int:
    """The model's parameters: tied ones once, with router biases, without MTP."""
    return _backbone(model, None)


def active_parameters(model: ModelConfig) -> int:
    """Parameters that one token meets in the model without MTP: of the routed experts only the chosen ones."""
    if (foreign := foreign_of(model)) is not None:
        return foreign.active
    return _backbone(model, model.moe_router_topk)


def mtp_parameters(model: ModelConfig) -> int:
    """The parameters of all MTP modules, without copies of embedding and output."""
    return (model.mtp_num_layers or 0) * _elements(kind_parameters(Sizes.of(model), Kind("mtp", mtp_is_moe(model))))


def hugging_face_parameters(model: ModelConfig) -> int:
    """The model's parameters as Hugging Face stores them: MTP modules each have copies of embedding and output."""
    copies = (model.mtp_num_layers or 0) * 2 * mtp_embedding(Sizes.of(model)).elements
    return total_parameters(model) + mtp_parameters(model) + copies


def _backbone(model: ModelConfig, experts: int | None) -> int:
    sizes = Sizes.of(model)
    once = [row for row in beside_layers(sizes) if row.copy_of is None]
    kinds = Counter(layer_kinds(model, (Layer("decoder", index) for index in range(model.num_layers))))
    layers = sum(number * _elements(kind_parameters(sizes, kind), experts) for kind, number in kinds.items())
    return layers + _elements(once)


# Muon's matrices (decision 67)


class Orthogonalised(NamedTuple):
    """The matrices of a pp_rank that Muon updates."""

    elements: Count
    """The matrices' elements, over all ranks."""
    dense: int = 0
    """Elements of the dense matrices of the rank that owns most."""
    experts: int = 0
    """Elements of the experts' matrices of the rank that owns most."""
    operations: int = 0
    """Operations of one step of the iteration, on the rank with the most."""

    def on(self, sizes: ParallelSizes) -> tuple[int, int]:
        """(dense elements, experts' elements) on one device, before sharding."""
        return on_device(self.elements, sizes)

    @property
    def owned(self) -> int:
        """Elements of the matrices, dense and experts', of the rank that owns most."""
        return self.dense + self.experts


def _hidden_matrices(model: ModelConfig, layers: Iterable[Layer]) -> list[tuple[Parameter, int]]:
    """The rows of a stage that Muon updates, each with the number of layers that have it."""
    return [(row, number) for row, number in stage_rows(model, layers) if row.hidden_matrix]


def orthogonalised(
    model: ModelConfig, stages: Iterable[Iterable[Layer]], sizes: ParallelSizes, *, shared: bool
) -> Orthogonalised:
    """The matrices of a rank's stages that Muon updates. `shared`: whether, under sharding, one rank owns each."""
    rows = [row for layers in stages for row in _hidden_matrices(model, layers)]
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
    """The most bytes beside the state while matrices are in the iteration, `limit` elements of one shape together.
    First all inputs in bfloat16, and one stack's as wide as gradients; then the inputs, the results of two steps and
    two squares of the shorter side."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, number in (row for layers in stages for row in _hidden_matrices(model, layers)):
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
    """(elements, operations), each of the rank that has most of them."""
    elements, operations = [0] * ranks, [0] * ranks
    for matrices, owned in zip(entries, deal(entries, ranks), strict=True):
        for rank, number in enumerate(owned):
            elements[rank] += number * matrices.size
            operations[rank] += number * matrices.operations
    return max(elements), max(operations)
