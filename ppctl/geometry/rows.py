"""A row of the table of parameters: the facts of one parameter, of ppctl's own decoder or of another model; and the
part of it that a rank holds, by the rank's places on the axes that split parameters.

An axis splits a dim into neighbouring runs, equal but for the last ones: a vocabulary needs no padding to be divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

Role = Literal["matrix", "expert", "router", "other", "embedding", "norm", "bias", "correction"]
"""matrix: of a product with activations; expert: a matrix of a routed expert; router: scores of experts; other: a
weight of transformers models that decays as matrices do but is no matrix of a hidden layer, such as a head's, filters
of a convolution or rates of decay; bias: added to a product or a norm; correction: a bias that balances a router,
updated once a step without a gradient."""

Gradient = Literal["complete", "tokens", "heads", "none"]
"""The gradient that a tensor-parallel rank has after its backward. complete: the whole gradient of its part. tokens:
under sequence parallelism, that of the rank's own tokens, to be summed over tp. heads: that of its own heads, always to
be summed over tp, as also for a parameter that tp cannot split after all (`units`). none: no gradient at all."""

Start = Literal["ones", "zeros", "normal", "residual", "adapter"]
"""normal: drawn with init_method_std; residual: with init_method_std / sqrt(2 x num_layers), since every layer adds two
of these projections to the residual stream (Radford et al. 2019, GPT-2); adapter: with 1 over the number of its rows,
which is the adapter's rank (peft's init_lora_weights="gaussian")."""

Splits = tuple[tuple[str, int], ...]
"""(axis, dim) of every parallel axis that splits a parameter, which is whole on all other axes."""

EMBEDDING = "tok_embeddings.weight"
MTP_EMBEDDING = "mtp.tok_embeddings.weight"
"""The copy of the embedding beside the MTP modules, a further use of the embedding."""
OUTPUT = "output.weight"


class Parameter(NamedTuple):
    """A row: one parameter of a layer, or one of every expert of a layer."""

    name: str
    """Canonical, with {layer} and {expert} for their indexes: `layers.{layer}.moe.experts.{expert}.w1.weight`."""
    shape: tuple[int, ...]
    """Shape of one expert's parameter; modules stack experts, [experts, *shape]."""
    role: Role
    splits: Splits = ()
    """The axes that split the parameter; dims are those of the stack if there is one, and its dim 0 is the experts."""
    gradient: Gradient = "complete"
    start: Start = "normal"
    recomputed: str | None = None
    """The entry of train.recompute_modules whose recomputation uses the parameter."""
    experts: int = 0
    """The number of experts, each with such a parameter; 0 for a parameter outside experts."""
    copy_of: str | None = None
    """The canonical name of the parameter of which this is a further use."""
    units: int = 0
    """Number of indivisible parts of the dim that tp splits (key/value groups); 0 if every element can be split."""

    @property
    def size(self) -> int:
        """The number of elements of one expert's parameter, or of a parameter without experts."""
        return prod(self.shape)

    @property
    def elements(self) -> int:
        """The number of elements in a layer, for all experts together."""
        return self.size * (self.experts or 1)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with the parameter; false for uses of an embedding."""
        return self.role in ("matrix", "expert", "router", "other")

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms, biases and embeddings in any of their uses."""
        return self.is_matrix

    @property
    def hidden_matrix(self) -> bool:
        """Whether Muon updates the parameter: matrices of hidden layers and of experts, not the output's. The last two
        dims are a matrix's; a dim before these counts experts, in transformers models."""
        return self.is_matrix and self.role != "other" and self.name != OUTPUT

    @property
    def frozen(self) -> bool:
        """Whether training leaves the parameter as it is: a weight beside adapters."""
        return self.gradient == "none" and self.role != "correction"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split the parameter. `tp/8`: only if tp divides 8 units; `tp:37`: 37 tokens, in uneven runs."""
        if self.units:
            return tuple(f"{axis}/{self.units}" if axis == "tp" else axis for axis, _ in self.splits)
        words = self.name in (EMBEDDING, MTP_EMBEDDING, OUTPUT)
        return tuple(f"{axis}:{self.shape[dim]}" if words else axis for axis, dim in self.splits)

    def splits_over(self, ranks: int) -> bool:
        """Whether `ranks` ranks can split the parameter; if it has fewer units than ranks, each rank has the whole."""
        return not self.units or self.units % ranks == 0

    def inside(self, block: str) -> bool:
        """Whether the parameter is in this block of a decoder layer: `attention`, `feed_forward`, `moe`."""
        return f".{block}." in self.name

    def called(self, layer: int = 0) -> str:
        """The canonical name in layer `layer`; for experts the name of their stack."""
        name = stack_name(self.name) if self.experts else self.name
        return name.format(layer=layer)


def stack_name(pattern: str) -> str:
    """The name under which a module holds all experts' tensors: `...experts.w1` of `...experts.{expert}.w1.weight`."""
    return pattern.replace(".{expert}", "").removesuffix(".weight")


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
    """The places of a rank on the axes that split parameters (`Parameter.splits`) or sequences."""

    tp: Place = ONLY
    ep: Place = ONLY
    etp: Place = ONLY
    cp: Place = ONLY
    """The axis that splits sequences, not parameters."""

    @classmethod
    def at(cls, position: Mapping[str, int], sizes: object) -> Parts:
        """The parts of a rank at this position on the axes of both grids; `sizes` has the axes' sizes."""
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
        """The shape of the part of a parameter that the rank holds, the stack of experts included."""
        return tuple(len(run) for run in self.runs(row))

    def slices(self, row: Parameter) -> tuple[slice, ...]:
        """The slices that the rank holds of one expert's parameter, or of a parameter without experts."""
        return tuple(slice(run.start, run.stop) for run in self.runs(row)[bool(row.experts) :])


WHOLE = Parts()
"""The parts of a single rank, which holds everything."""


def tp_sums(row: Parameter, tp: int, *, sequence_parallel: bool) -> bool:
    """Whether tensor-parallel ranks have partial gradients of the row, to be summed over tp once a step."""
    if tp == 1 or row.gradient == "none":
        return False
    return row.gradient == "heads" or (row.gradient == "tokens" and sequence_parallel) or not row.splits_over(tp)
