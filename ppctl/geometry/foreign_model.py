"""A causal language model of transformers as a value: its rows of the table of parameters, its parts, its costs.

A child process describes the model once (`ppctl.foreign.describe`), and the text travels in the config
(`model.transformers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.foreign_costs import PartCosts
from ppctl.geometry.rows import Parameter
from ppctl.records.json_reader import read

VERSION = 3
"""Version of the text; an older model is described again."""


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
    """How a layer returns its hidden state: 0 as a tensor, else as the first element of a tuple of so many elements."""
    early: tuple[str, ...] = ()
    """Modules of `last` that the model lists before its layers."""
    routers: tuple[int, ...] = ()
    """By layer, how many tensors its routers record for what the model's own code adds to the loss; empty if that
    adds nothing."""

    def layer(self, index: int) -> str:
        """The name of a layer's module."""
        return f"{self.layers}.{index}"

    def place(self, name: str) -> int:
        """The part of the model in whose turn its own code lists a parameter: before the layers, in them, after."""
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
    """What it has that other kinds of the model have not: `self_attn.sliding_window=4096`; empty if all are one."""
    rows: tuple[Parameter, ...]
    """Names are patterns, with {layer} for the index."""


class Adapters(NamedTuple):
    """Low-rank adapters (Hu et al., arXiv:2106.09685): to a product with W they add alpha / rank * B A, and W stays."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """The ends of the names of the modules that have one: `q_proj`, `self_attn.q_proj`."""
    layers: tuple[int, ...] = ()
    """The decoder layers that have them; empty: all."""


class RouterLogits(NamedTuple):
    """The logits that one router records of a microbatch, [tokens, width]; equal for all routers of a model."""

    width: int
    """The number of experts, one logit each."""
    wide: bool
    """Whether the logits are float32 although weights have 16 bits."""
    wide_in_autocast: bool
    """Whether the logits are float32 although products are cast to 16 bits."""


class ForeignModel(NamedTuple):
    """A model of transformers that was proved to run in stages."""

    config: str
    """The model's config.json with the overrides of `model.hf_overrides`, as JSON."""
    overrides: Mapping[str, str]
    transformers: str
    """The version of the library that described it."""
    stages: tuple[str, ...]
    """What each stage of the proof held."""
    anatomy: Anatomy
    first: tuple[Parameter, ...]
    """Rows of what runs before the layers."""
    last: tuple[Parameter, ...]
    layers: tuple[int, ...]
    """For each layer, its index in `kinds`."""
    kinds: tuple[LayerKind, ...]
    measured: tuple[PartCosts, ...]
    """What the parts cost, by width of numbers and by length."""
    sizes: Mapping[str, Any]
    """The fields of ModelConfig that the model decides over."""
    active: int
    """The number of parameters that one token meets: of routed experts only the chosen ones."""
    notes: tuple[str, ...] = ()
    """What differs from transformers' own training, for the plan."""
    adapters: Adapters | None = None
    """What is trained in place of the weights, which are frozen then."""
    router_logits: RouterLogits | None = None
    """For models whose code adds a loss over the routers of all layers."""
    gradients: int = 0
    """The number of gradients that the proof compared."""

    def routed(self, layers: int) -> int:
        """How many tensors the routers of the first `layers` layers record: a message after these layers carries
        all."""
        return sum(self.anatomy.routers[:layers])

    def routed_bytes(self, layers: int, tokens: int, element: int) -> int:
        """Bytes of the logits that the routers of the first `layers` layers record for `tokens` tokens.

        `element` is the bytes of a weight's element; routers that compute in float32 record 4 bytes for each logit.
        """
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
        """The inverse of `to_text`. Raises ValueError for any other text."""
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
    """The first decoder layer that has something to train; 0 if what stands before them is trained."""
    model = described(text)
    if any(row.gradient != "none" for row in model.first):
        return 0
    trained = [any(row.gradient != "none" for row in kind.rows) for kind in model.kinds]
    return next((index for index, kind in enumerate(model.layers) if trained[kind]), model.anatomy.count)


def foreign_of(model: ModelConfig) -> ForeignModel | None:
    """The model of transformers that a config has; None if the blocks are ppctl's own."""
    return None if model.transformers is None else described(model.transformers)
