"""Which uses share one parameter, over the stages of a pipeline.

Knows stages' layers and the table of parameters. Must not know tensors or modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import EMBEDDING_USES, embedding_uses
from ppctl.plan import StageSpec


class Use(NamedTuple):
    """One place where a shared parameter is used: the stage, its pp_rank and the use's own canonical name."""

    stage: int
    pp_rank: int
    name: str


def tied_uses(stages: Iterable[StageSpec], model: ModelConfig) -> tuple[Use, ...]:
    """The uses of the token embedding in canonical order (embedding, output, MTP), or () if it has but one."""
    found = {name: spec for spec in stages for name in embedding_uses(model, spec.layers)}
    uses = tuple(Use(found[name].stage, found[name].pp_rank, name) for name in EMBEDDING_USES if name in found)
    return uses if len(uses) > 1 else ()
