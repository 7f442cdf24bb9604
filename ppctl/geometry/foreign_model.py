"""A transformers causal language model as a value: its rows of the table of parameters, its parts, and the parts'
costs, which are measured on meta tensors.

A child process describes the model once (`ppctl.foreign.describe`); the config carries the text (`model.transformers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.rows import Parameter
from ppctl.records.json_reader import read

VERSION = 4
"""Version of the text; a model described by an older version is described again."""


class Growth(NamedTuple):
    """A number for b sequences of s tokens: constant + line * s + square * s^2 + b * (token * s + pair * s^2)."""

    constant: float = 0.0
    token: float = 0.0
    pair: float = 0.0
    line: float = 0.0
    """Per token, shared by all sequences, such as tables of positions."""
    square: float = 0.0
    """Per pair of tokens, shared by all sequences, such as masks."""

    def of(self, sequences: int, length: int) -> float:
        """Return the number for `sequences` sequences of `length` tokens."""
        each = self.token * length + self.pair * length**2
        return self.constant + self.line * length + self.square * length**2 + sequences * each


Peak = tuple[Growth, ...]
"""The moments that may have the most bytes; the sequences decide which one has them."""


def most(peak: Peak, sequences: int, length: int, more: float = 0.0) -> float:
    """Return the bytes of the largest moment of a peak, for `sequences` sequences of `length` tokens, with `more` at
    each moment; at least 0."""
    return max((0.0, *(moment.of(sequences, length) + more for moment in peak)))


class LayerCost(NamedTuple):
    """Costs of one layer, or of the part before or after all layers. Bytes are of one microbatch."""

    flops: Growth
    """Operations of a forward: products with weights by token; scores and weighted values by pair, halved for
    causality."""
    kept: Growth
    """Bytes from the layer's forward to its backward, without its input and without tables."""
    keeps_input: bool
    in_forward: Peak
    """Bytes beside `kept` and beside all tables, while the layer's forward runs."""
    in_backward: Peak
    """Bytes beside those still kept, while the layer's backward runs; gradients of weights are constants."""
    in_inputs: Peak
    """Bytes beside those still kept, while the I of a split backward runs."""
    deferred: Growth
    """Bytes from the layer's I to its W."""
    in_weights: Peak
    """Bytes beside `deferred`, while the layer's W runs."""
    reads: tuple[int, ...] = ()
    """The tables that the layer is called with; if recomputed, it keeps all of them."""
    keeps: tuple[int, ...] = ()
    """The tables that the layer keeps for its backward."""
    back: tuple[Growth, Growth] | None = None
    """Operations of both halves of a backward, for the input's gradient and for weights'. None if all weights are
    trained: together twice the forward's."""
    drawing: tuple[Peak, Peak, Peak] = ((), (), ())
    """The moments of `in_forward`, `in_backward` and `in_inputs` at which dropout of adapters draws, without the bytes
    of its draws."""


class PartCosts(NamedTuple):
    """Costs of all parts of a model in numbers of one width, for sequences of some lengths."""

    element: int
    """Bytes of a number."""
    above: int
    """The costs hold for sequences longer than this: 0, or the most tokens with which a window needs no mask."""
    tables: tuple[Growth, ...]
    """Bytes of the tables that every forward makes for its layers: masks, cosines and sines, positions."""
    before: Growth
    """Bytes beside the tables while layers run forward: a stand-in for the embedding's result."""
    first: LayerCost
    """Costs of the part before the layers."""
    last: LayerCost
    """Costs of the part after the layers, up to the logits."""
    layers: tuple[LayerCost, ...]
    """Costs by kind of layer."""

    def cost(self, kind: str, structure: int) -> LayerCost | None:
        """Costs of the embedding, a decoder layer of this structure, or the loss without its function; else None."""
        if kind == "decoder":
            return self.layers[structure]
        return {"embedding": self.first, "loss": self.last}.get(kind)


def measured_for(measured: Sequence[PartCosts], element: int, length: int) -> PartCosts:
    """The costs for numbers of `element` bytes and sequences of `length` tokens. If numbers of this width were not
    measured, the bytes are those of the widest measured numbers, in proportion to the width."""
    width = element if any(each.element == element for each in measured) else max(each.element for each in measured)
    fitting = sorted((each for each in measured if each.element == width), key=lambda each: each.above)
    chosen: PartCosts = next((each for each in reversed(fitting) if each.above < length), fitting[0])
    return chosen if width == element else _scaled(chosen, element / width)


_BYTES_OF_LAYER = ("kept", "in_forward", "in_backward", "in_inputs", "deferred", "in_weights", "drawing")
_BYTES_OF_PARTS = ("tables", "before", "first", "last", "layers")
"""Fields whose numbers are bytes, or records that have such fields."""


def _scaled(costs: Any, factor: float) -> Any:
    if isinstance(costs, Growth):
        return Growth(*(factor * value for value in costs))
    if isinstance(costs, LayerCost | PartCosts):
        names = _BYTES_OF_LAYER if isinstance(costs, LayerCost) else _BYTES_OF_PARTS
        return costs._replace(**{name: _scaled(getattr(costs, name), factor) for name in names})
    return tuple(_scaled(each, factor) for each in costs)


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model, by the names of their modules."""

    layers: str
    """The list of decoder layers: `model.layers`, `transformer.h`."""
    count: int
    first: tuple[str, ...]
    """Modules with parameters or saved buffers that run before the layers, in the model's order: embeddings."""
    last: tuple[str, ...]
    """The modules that run after the layers: final norm and head."""
    embedding: str
    head: str
    tied: bool
    """Whether the head's weight is the embedding's."""
    returned: int
    """How a layer returns its hidden state: 0 for a tensor, n for the first element of a tuple of n elements."""
    early: tuple[str, ...] = ()
    """Modules of `last` that the model lists before its layers."""
    routers: tuple[int, ...] = ()
    """By layer, how many tensors its routers record for the loss of the model's own code; empty without such a loss."""

    def layer(self, index: int) -> str:
        """The name of a layer's module."""
        return f"{self.layers}.{index}"

    def place(self, name: str) -> int:
        """Where the model's own code lists a parameter: 0 before the layers, 1 in them, 2 after."""
        inside = name.startswith(f"{self.layers}.")
        return 1 if inside else 0 if name.rpartition(".")[0] in (*self.first, *self.early) else 2

    @property
    def uses(self) -> tuple[str, ...]:
        """The names of the uses of the embedding's table, the owner first."""
        names = f"{self.embedding}.weight", f"{self.head}.weight"
        return names if self.tied else names[:1]


class LayerKind(NamedTuple):
    """Layers of one structure: names, shapes and costs are equal."""

    name: str
    """Traits that not all kinds of the model have: `self_attn.sliding_window=4096`; empty if there is one kind."""
    rows: tuple[Parameter, ...]
    """Names are patterns, with {layer} for the index."""


class Adapters(NamedTuple):
    """Low-rank adapters (Hu et al., arXiv:2106.09685): they add alpha / rank * B A to a fixed W."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The ends of the names of the modules with an adapter: `q_proj`, `self_attn.q_proj`."""
    layers: tuple[int, ...] = ()
    """The decoder layers with adapters; empty: all."""
    dropout: float = 0.0
    """The probability with which an element of an adapter's input is dropped in training."""
    modules_to_save: tuple[str, ...] = ()
    """The ends of the names of the modules that are trained whole, as peft matches them: `lm_head`, `norm`."""


class RouterLogits(NamedTuple):
    """The logits that one router records of a microbatch, [tokens, width]; equal for all routers of a model."""

    width: int
    """The number of experts, one logit each."""
    wide: bool
    """Whether the logits are float32 although weights have 16 bits."""
    wide_in_autocast: bool
    """Whether the logits are float32 although products are cast to 16 bits."""


class ForeignModel(NamedTuple):
    """A transformers model that was proved to run in stages."""

    config: str
    """The model's config.json with the overrides of `model.hf_overrides`, as JSON."""
    overrides: Mapping[str, str]
    transformers: str
    """The version of transformers that described the model."""
    stages: tuple[str, ...]
    """The layers of each stage of the proof."""
    anatomy: Anatomy
    first: tuple[Parameter, ...]
    """Rows of the parameters before the layers."""
    last: tuple[Parameter, ...]
    layers: tuple[int, ...]
    """For each layer, its index in `kinds`."""
    kinds: tuple[LayerKind, ...]
    measured: tuple[PartCosts, ...]
    """The costs of the parts, by width of numbers and by length."""
    sizes: Mapping[str, Any]
    """The fields of ModelConfig that the model determines."""
    active: int
    """The number of parameters that one token meets; of the routed experts, only the chosen ones count."""
    notes: tuple[str, ...] = ()
    """The differences from transformers' own training, for the plan."""
    adapters: Adapters | None = None
    """The adapters that are trained in place of the weights, which are frozen then."""
    router_logits: RouterLogits | None = None
    """The routers' logits, for models whose code adds a loss over the routers of all layers."""
    gradients: int = 0
    """The number of gradients that the proof compared."""

    def routed(self, layers: int) -> int:
        """How many tensors the routers of the first `layers` layers record; a message sent after these carries all."""
        return sum(self.anatomy.routers[:layers])

    def routed_bytes(self, layers: int, tokens: int, element: int) -> int:
        """Bytes of the logits that the routers of the first `layers` layers record for `tokens` tokens. `element` is
        the bytes of a weight's element; routers that compute in float32 record 4 bytes for each logit."""
        logits = self.router_logits
        return 0 if logits is None else self.routed(layers) * tokens * logits.width * (4 if logits.wide else element)

    def rows(self, kind: str, structure: int) -> tuple[Parameter, ...]:
        """The rows of one layer: the embedding, a decoder layer of this structure, or the loss."""
        if kind == "decoder":
            return self.kinds[structure].rows
        return {"embedding": self.first, "loss": self.last}.get(kind, ())

    def to_text(self) -> str:
        """Return the model as JSON, equal for equal models."""
        data = {"version": VERSION, **self._asdict(), "anatomy": asdict(self.anatomy)}
        return json.dumps(data, separators=(",", ":"))

    @classmethod
    def from_text(cls, text: str) -> ForeignModel:
        """Return the model of a text of `to_text`. Raises ValueError for any other text."""
        try:
            data = json.loads(text)
            if data.pop("version") != VERSION:
                raise ValueError("it is of another version of ppctl")
            return read(cls, data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it does not describe a model ({type(error).__name__})") from None


@cache
def described(text: str) -> ForeignModel:
    """The model that `model.transformers` describes; each text is read once."""
    return ForeignModel.from_text(text)


@cache
def first_trained(text: str) -> int:
    """The first decoder layer with trained weights; 0 if something before the layers is trained."""
    model = described(text)
    if any(row.gradient != "none" for row in model.first):
        return 0
    trained = [any(row.gradient != "none" for row in kind.rows) for kind in model.kinds]
    return next((index for index, kind in enumerate(model.layers) if trained[kind]), model.anatomy.count)


def foreign_of(model: ModelConfig) -> ForeignModel | None:
    """The transformers model that a config has; None if the blocks are ppctl's own."""
    return None if model.transformers is None else described(model.transformers)
