"""Costs of the parts of a model of transformers, measured on meta tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Growth(NamedTuple):
    """A number for b sequences of s tokens: constant + line * s + square * s^2 + b * (token * s + pair * s^2)."""

    constant: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    line: float = 0.0
    """Per token of one sequence: what all sequences share, such as tables of positions."""
    square: float = 0.0
    """Per pair of tokens of one sequence: such as masks that all share."""

    def of(self, sequences: int, length: int) -> float:
        """Return the number for `sequences` sequences of `length` tokens."""
        each = self.token * length + self.pair * length**2
        return self.constant + self.line * length + self.square * length**2 + sequences * each


Peak = tuple[Growth, ...]
"""The moments of which one has the most bytes: which one that is depends on the sequences."""


def most(peak: Peak, sequences: int, length: int) -> float:
    """Return the bytes of the largest moment of a peak, for `sequences` sequences of `length` tokens; at least 0."""
    return max((0.0, *(moment.of(sequences, length) for moment in peak)))


class LayerCost(NamedTuple):
    """Costs of one layer, or of what stands before or after all layers. Bytes are those of one microbatch."""

    flops: Growth
    """Operations of a forward: products with weights by token, scores and weighted values by pair, causal: halved."""
    kept: Growth
    """Bytes from the layer's forward to its backward, without its input and without tables."""
    keeps_input: bool
    in_forward: Peak
    """Bytes beside `kept` and beside all tables, while the layer's forward runs."""
    in_backward: Peak
    """Bytes beside what is still kept, while the layer's backward runs; gradients of weights are constants."""
    in_inputs: Peak
    """Bytes beside what is still kept, while the I of a split backward runs."""
    deferred: Growth
    """Bytes from the layer's I to its W."""
    in_weights: Peak
    """Bytes beside `deferred`, while the layer's W runs."""
    reads: tuple[int, ...] = ()
    """The tables that it is called with: recomputed, it keeps all of them."""
    keeps: tuple[int, ...] = ()
    """The tables that the layer keeps for its backward."""
    back: tuple[Growth, Growth] | None = None
    """Operations of both halves of a backward, for the input's gradient and for weights'. None if all weights are
    trained: both together are two forwards."""


class PartCosts(NamedTuple):
    """All parts of a model in numbers of one width, for sequences of some lengths."""

    element: int
    """Bytes of a number."""
    above: int
    """Sequences are longer: a window needs a mask if it is no longer than a sequence."""
    tables: tuple[Growth, ...]
    """Bytes of what every forward makes for its layers: masks, cosines and sines, positions."""
    before: Growth
    """Bytes beside these while layers run forward: a stand-in for the embedding's result."""
    first: LayerCost
    """Costs of the part before the layers."""
    last: LayerCost
    """Costs of the part after the layers, up to the logits."""
    layers: tuple[LayerCost, ...]
    """Costs by kind of layer."""

    def cost(self, kind: str, structure: int) -> LayerCost | None:
        """Costs of the embedding, of a decoder layer of this structure, or of the loss without its function."""
        if kind == "decoder":
            return self.layers[structure]
        return {"embedding": self.first, "loss": self.last}.get(kind)

    def tables_of(self, numbers: Iterable[int], sequences: int, length: int) -> float:
        """Return the bytes of these tables, each counted once."""
        return sum(self.tables[number].of(sequences, length) for number in set(numbers))


def measured_for(measured: Sequence[PartCosts], element: int, length: int) -> PartCosts:
    """The costs measured for numbers of `element` bytes and sequences of `length` tokens; wider numbers cost in
    proportion to the widest measured."""
    width = element if any(each.element == element for each in measured) else max(each.element for each in measured)
    fitting = sorted((each for each in measured if each.element == width), key=lambda each: each.above)
    chosen: PartCosts = next((each for each in reversed(fitting) if each.above < length), fitting[0])
    return chosen if width == element else _scaled(chosen, element / width)


_BYTES_OF_LAYER = ("kept", "in_forward", "in_backward", "in_inputs", "deferred", "in_weights")
_BYTES_OF_PARTS = ("tables", "before", "first", "last", "layers")
"""Fields whose numbers are bytes, or records that have such fields."""


def _scaled(costs: Any, factor: float) -> Any:
    if isinstance(costs, Growth):
        return Growth(*(factor * value for value in costs))
    if isinstance(costs, LayerCost | PartCosts):
        names = _BYTES_OF_LAYER if isinstance(costs, LayerCost) else _BYTES_OF_PARTS
        return costs._replace(**{name: _scaled(getattr(costs, name), factor) for name in names})
    return tuple(_scaled(each, factor) for each in costs)
