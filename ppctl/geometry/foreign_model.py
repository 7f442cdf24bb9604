"""A causal language model of transformers as a value: its rows of the table of parameters, its parts, its costs.

Knows what plans, checkpoints and stages ask of a model whose blocks are not ppctl's. Must not know torch, transformers
or files: a child process describes the model once (`ppctl.foreign.describe`), and the text travels in the config
(`model.transformers`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.rows import Parameter

VERSION = 1
"""Of the text; another one is described anew."""


@dataclass(frozen=True, slots=True)
class Anatomy:
    """The parts of a model, by the names of their modules."""

    layers: str
    """The list of decoder layers: `model.layers`, `transformer.h`."""
    count: int
    first: tuple[str, ...]
    """Modules with parameters or saved buffers that run before the layers, in the model's order: embeddings."""
    last: tuple[str, ...]
    """The same behind the layers: final norm and head."""
    embedding: str
    head: str
    tied: bool
    """Whether the head's weight is the embedding's."""
    returned: int
    """How a layer returns its hidden state: 0 as it is, else as the first of a tuple of so many."""
    early: tuple[str, ...] = ()
    """Those of `last` that the model lists before its layers."""
    routers: tuple[int, ...] = ()
    """By layer, how many tensors its routers record for what the model's own code adds to the loss; empty where that
    adds nothing."""

    def layer(self, index: int) -> str:
        """The name of a layer's module."""
        return f"{self.layers}.{index}"

    def place(self, name: str) -> int:
        """The part of the model in whose turn its own code lists a parameter: before the layers, in them, behind."""
        inside = name.startswith(f"{self.layers}.")
        return 1 if inside else 0 if name.rpartition(".")[0] in (*self.first, *self.early) else 2

    @property
    def uses(self) -> tuple[str, ...]:
        """The names of the uses of the embedding's table, the owner first."""
        names = f"{self.embedding}.weight", f"{self.head}.weight"
        return names if self.tied else names[:1]


class Growth(NamedTuple):
    """A number for one sequence of s tokens: constant + token * s + pair * s^2."""

    constant: float
    token: float
    pair: float

    def of(self, sequences: int, length: int) -> float:
        """For so many sequences of so many tokens; the constant counts once."""
        return self.constant + sequences * (self.token * length + self.pair * length**2)


class LayerCost(NamedTuple):
    """What one layer costs, measured on tensors without values."""

    flops: Growth
    """Operations of a forward: products with weights by token, scores and weighted values by pair, causal: halved."""
    kept: Growth
    """Bytes from its forward to its backward, its input among them."""
    in_forward: Growth
    """Bytes beside these, at most, while its forward runs."""
    in_backward: Growth
    """Bytes beside what is still kept, at most, while its backward runs; gradients of weights are the constant."""


class LayerKind(NamedTuple):
    """Layers of one structure: names, shapes and costs are equal."""

    rows: tuple[Parameter, ...]
    """Names are patterns, with {layer} for the index."""
    costs: Mapping[int, LayerCost]
    """By the bytes of an element: 2 and 4."""

    @property
    def flops(self) -> Growth:
        """Operations of a forward, which no width of numbers changes."""
        return next(iter(self.costs.values())).flops

    def cost(self, element: int) -> LayerCost:
        """In numbers of so many bytes; wider ones than were measured keep in proportion."""
        if element in self.costs:
            return self.costs[element]
        widest = max(self.costs)
        flops, *held = self.costs[widest]
        return LayerCost(flops, *(Growth(*(element / widest * value for value in each)) for each in held))


class RouterLogits(NamedTuple):
    """What one router records of a microbatch, [tokens, width]; equal for all routers of a model."""

    width: int
    """Experts."""
    wide: bool
    """Whether it is float32 where weights have 16 bits."""
    wide_in_autocast: bool
    """The same where products are cast to 16 bits."""


class ForeignModel(NamedTuple):
    """A model of transformers that was proved to run in stages."""

    config: str
    """Its config.json with the overrides of `model.hf_overrides`, as JSON."""
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
    """By layer, which of `kinds` it is."""
    kinds: tuple[LayerKind, ...]
    sizes: Mapping[str, Any]
    """The fields of ModelConfig that the model decides over."""
    active: int
    """Parameters that one token meets: of routed experts only the chosen ones."""
    notes: tuple[str, ...] = ()
    """What differs from transformers' own training, for the plan."""
    router_logits: RouterLogits | None = None
    """Of models whose code adds a loss over the routers of all layers."""

    def routed(self, layers: int) -> int:
        """How many tensors the routers of the first so many layers record: a hop behind these carries them all."""
        return sum(self.anatomy.routers[:layers])

    def routed_bytes(self, layers: int, tokens: int, element: int) -> int:
        """Bytes of these for so many tokens, where weights have elements of so many bytes."""
        logits = self.router_logits
        return 0 if logits is None else self.routed(layers) * tokens * logits.width * (4 if logits.wide else element)

    def rows(self, kind: str, structure: int) -> tuple[Parameter, ...]:
        """Those of one layer: of the embedding, of a decoder layer of this structure, of the loss."""
        if kind == "decoder":
            return self.kinds[structure].rows
        return {"embedding": self.first, "loss": self.last}.get(kind, ())

    def to_text(self) -> str:
        """JSON, equal for equal models."""
        kinds = [
            {"rows": kind.rows, "costs": {str(width): cost for width, cost in kind.costs.items()}}
            for kind in self.kinds
        ]
        return json.dumps(
            {"version": VERSION, **self._asdict(), "anatomy": asdict(self.anatomy), "kinds": kinds},
            separators=(",", ":"),
        )

    @classmethod
    def from_text(cls, text: str) -> ForeignModel:
        """The inverse of `to_text`. Raises ValueError for any other text."""
        try:
            data = json.loads(text)
            if data.pop("version") != VERSION:
                raise ValueError("it is of another version of ppctl")
            kinds = tuple(
                LayerKind(
                    _rows(kind["rows"]),
                    {int(w): LayerCost(*(Growth(*growth) for growth in cost)) for w, cost in kind["costs"].items()},
                )
                for kind in data.pop("kinds")
            )
            parts = data.pop("anatomy")
            lists = {key: tuple(each) for key, each in parts.items() if isinstance(each, list)}
            anatomy = Anatomy(**{**parts, **lists})
            logits = data.pop("router_logits", None)
            logits = None if logits is None else RouterLogits(*logits)
            first, last = _rows(data.pop("first")), _rows(data.pop("last"))
            others: dict[str, Any] = {name: tuple(data.pop(name)) for name in ("stages", "layers", "notes")}
            return cls(anatomy=anatomy, first=first, last=last, kinds=kinds, router_logits=logits, **others, **data)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it does not describe a model ({type(error).__name__})") from None


def _rows(rows: list[Any]) -> tuple[Parameter, ...]:
    return tuple(Parameter(name, tuple(shape), role, (), *rest) for name, shape, role, _, *rest in rows)


@cache
def described(text: str) -> ForeignModel:
    """The model that `model.transformers` describes; each text is read once."""
    return ForeignModel.from_text(text)


def foreign_of(model: ModelConfig) -> ForeignModel | None:
    """The model of transformers that a config has; None where the blocks are ppctl's own."""
    return None if model.transformers is None else described(model.transformers)
