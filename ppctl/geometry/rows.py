"""A row of the table of parameters: what is known of one parameter, of ppctl's own decoder or of another model; and
which part of it a rank holds, by its places on the axes that split parameters.

An axis splits a dim into neighbouring runs, equal but for the last ones: a vocabulary needs no padding to be divided.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Literal, NamedTuple

Role = Literal["matrix", "expert", "router", "other", "embedding", "norm", "bias", "correction"]
"""matrix: of a product with activations, and expert: such a matrix of a routed expert; router: scores of experts;
other: of transformers' models what decays as matrices do and is none of a hidden layer, as a head, a convolution's
filters or rates of decay; bias: added to a product or a norm; correction: what balances a router, moved once a step
without a gradient."""

Gradient = Literal["complete", "tokens", "heads", "none"]
"""The gradient that a tensor-parallel rank has after its backward. complete: all of the gradient of what it holds.
tokens: that of its own tokens under sequence parallelism, to be summed over tp then. heads: that of its own heads, to
be summed over tp always. none: it is trained without one. What tp cannot split after all (`units`) has that of its own
heads."""

Start = Literal["ones", "zeros", "normal", "residual", "adapter"]
"""normal: drawn with init_method_std; residual: with init_method_std / sqrt(2 x num_layers), since every layer adds two
such projections to the residual stream (Radford et al. 2019, GPT-2); adapter: with 1 / rank, the number of its rows
(peft's init_lora_weights="gaussian")."""

Splits = tuple[tuple[str, int], ...]
"""(axis, dim) of every parallel axis that splits a parameter; on all others it is whole."""

EMBEDDING = "tok_embeddings.weight"
MTP_EMBEDDING = "mtp.tok_embeddings.weight"
"""The copy of the embedding beside the MTP modules: another use of it."""
OUTPUT = "output.weight"


class Parameter(NamedTuple):
    """A row: one parameter of a layer, or one of every expert of a layer."""

    name: str
    """Canonical, with {layer} and {expert} for their indexes: `layers.{layer}.moe.experts.{expert}.w1.weight`."""
    shape: tuple[int, ...]
    """Shape of one expert's parameter; modules stack experts, [experts, *shape]."""
    role: Role
    splits: Splits = ()
    """Dims are those of the stack if there is one: its dim 0 are the experts."""
    gradient: Gradient = "complete"
    start: Start = "normal"
    recomputed: str | None = None
    """The entry of train.recompute_modules that computes with it again."""
    experts: int = 0
    """The number of experts that each have such a parameter; 0 for a parameter that is no expert's."""
    copy_of: str | None = None
    """The canonical name of the parameter that this is a further use of."""
    units: int = 0
    """Number of indivisible parts of the dim that tp splits (key/value groups); 0 if every element can be split."""

    @property
    def size(self) -> int:
        """The number of elements of one expert's parameter, or of a parameter without experts."""
        return prod(self.shape)

    @property
    def elements(self) -> int:
        """The number of elements in a layer, of all experts together."""
        return self.size * (self.experts or 1)

    @property
    def is_matrix(self) -> bool:
        """Whether activations are multiplied with it, and it is no use of an embedding."""
        return self.role in ("matrix", "expert", "router", "other")

    @property
    def decayed(self) -> bool:
        """Whether weight decay applies: to matrices, not to norms, biases and embeddings in any of their uses."""
        return self.is_matrix

    @property
    def hidden_matrix(self) -> bool:
        """Whether Muon moves it: matrices of hidden layers and every expert's, not the output's. The last two dims are
        a matrix's; the one before, of transformers' experts, counts them."""
        return self.is_matrix and self.role != "other" and self.name != OUTPUT

    @property
    def frozen(self) -> bool:
        """Whether it is a weight that training leaves as it was: beside adapters."""
        return self.gradient == "none" and self.role != "correction"

    @property
    def axes(self) -> tuple[str, ...]:
        """The parallel axes that split it; `tp/8` does if it divides 8 units, `tp:37` cuts 37 words into runs."""
        if self.units:
            return tuple(f"{axis}/{self.units}" if axis == "tp" else axis for axis, _ in self.splits)
        words = self.name in (EMBEDDING, MTP_EMBEDDING, OUTPUT)
        return tuple(f"{axis}:{self.shape[dim]}" if words else axis for axis, dim in self.splits)

    def splits_over(self, ranks: int) -> bool:
        """Whether `ranks` ranks can split the parameter; if it has fewer units than ranks, each rank has the whole."""
        return not self.units or self.units % ranks == 0

    def inside(self, block: str) -> bool:
        """Whether it is in this block of a decoder layer: `attention`, `feed_forward`, `moe`."""
        return f".{block}." in self.name

    def called(self, layer: int = 0) -> str:
        """The canonical name in layer `layer`; of experts the name of their stack."""
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
