"""Canonical parameter names: which uses share one parameter, and which parameters weight decay leaves alone.

Knows names alone. Must not know tensors or modules. A canonical name is global: `layers.37.attention.wq.weight` means
the same parameter in every cut. A tied parameter has one name per use; the first use in canonical order owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.plan import StageSpec

EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"


def owner_of(name: str, model: ModelConfig) -> str:
    """The name of the parameter that `name` is a use of: itself, or the token embedding for a tied output."""
    return EMBEDDING if name == OUTPUT and model.share_embeddings_and_output_weights else name


def is_decayed(name: str, dim: int, model: ModelConfig) -> bool:
    """Whether weight decay applies: to matrices (dim 2 and more) that are not an embedding in any of their uses."""
    return dim > 1 and owner_of(name, model) != EMBEDDING


class Use(NamedTuple):
    """One place where a shared parameter is used: the stage, its pp_rank and the use's own canonical name."""

    stage: int
    pp_rank: int
    name: str


def tied_uses(stages: Iterable[StageSpec], model: ModelConfig) -> tuple[Use, ...]:
    """The uses of the token embedding in canonical order (embedding, output), or () if no parameter is tied."""
    if not model.share_embeddings_and_output_weights:
        return ()
    names = {"embedding": EMBEDDING, "loss": OUTPUT}
    return tuple(
        Use(spec.stage, spec.pp_rank, names[layer]) for spec in stages for layer in spec.layers if layer in names
    )
