"""Canonical parameter names: which uses share one parameter, and which parameters weight decay leaves alone.

Knows names alone. Must not know tensors or modules. A canonical name is global: `layers.37.attention.wq.weight` means
the same parameter in every cut. A tied parameter has one name per use; the first use in canonical order owns it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import Layer
from ppctl.plan import StageSpec

EMBEDDING = "tok_embeddings.weight"
OUTPUT = "output.weight"
MTP_EMBEDDING = "mtp.tok_embeddings.weight"
"""The copy of the embedding beside the MTP modules: another use of it."""


def owner_of(name: str, model: ModelConfig) -> str:
    """The name of the parameter that `name` is a use of: itself, or the token embedding for MTP's and a tied output."""
    tied = name == MTP_EMBEDDING or (name == OUTPUT and model.share_embeddings_and_output_weights)
    return EMBEDDING if tied else name


def expert_name(name: str, expert: int) -> str | None:
    """The canonical name of one expert's matrix in a stack: `layers.3.moe.experts.7.w1.weight` of `...experts.w1`.

    None for a name that is no stack: stacked are the routed experts of a layer, which any rank may hold a part of.
    """
    stack, _, matrix = name.rpartition(".")
    return f"{stack}.{expert}.{matrix}.weight" if stack.endswith(".experts") else None


def is_decayed(name: str, dim: int, model: ModelConfig) -> bool:
    """Whether weight decay applies: to matrices (dim 2 and more) that are not an embedding in any of their uses."""
    return dim > 1 and owner_of(name, model) != EMBEDDING


class Use(NamedTuple):
    """One place where a shared parameter is used: the stage, its pp_rank and the use's own canonical name."""

    stage: int
    pp_rank: int
    name: str


def tied_uses(stages: Iterable[StageSpec], model: ModelConfig) -> tuple[Use, ...]:
    """The uses of the token embedding in canonical order (embedding, output, MTP), or () if it has but one."""
    names = {Layer("embedding"): EMBEDDING, Layer("mtp"): MTP_EMBEDDING}
    if model.share_embeddings_and_output_weights:
        names[Layer("loss")] = OUTPUT
    found = {
        layer: Use(spec.stage, spec.pp_rank, names[layer]) for spec in stages for layer in spec.layers if layer in names
    }
    uses = tuple(found[layer] for layer in (Layer("embedding"), Layer("loss"), Layer("mtp")) if layer in found)
    return uses if len(uses) > 1 else ()
