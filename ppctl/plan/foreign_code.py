"""Notes in a plan on a model whose code is transformers': its proof, the loss that it trains with, its kinds of layers.

Knows Derived. Must not know how a model was described.
"""

from __future__ import annotations

from ppctl.config.schema import ModelConfig
from ppctl.geometry.foreign_model import ForeignModel, foreign_of
from ppctl.plan.types import Derived


def whose_code(model: ModelConfig) -> tuple[Derived, ...]:
    """Notes on a transformers model: what was proved, and what is trained differently."""
    foreign = foreign_of(model)
    if foreign is None:
        return ()
    proof = f"a miniature in {len(foreign.stages)} stages gave the same bits as the whole"
    equation = f"its own code, of transformers {foreign.transformers}, runs on every stage: {proof}"
    return (Derived("implementation", "transformers", "; ".join((equation, *foreign.notes))), *_kinds_of(foreign))


def _kinds_of(foreign: ForeignModel) -> tuple[Derived, ...]:
    """The kinds of layers that a model of transformers has, and in what they differ; nothing where there is one."""
    if len(foreign.kinds) < 2:
        return ()
    parts, unnamed = [], "parameters of other shapes" if foreign.adapters is None else "a whole backward"
    for number, kind in enumerate(foreign.kinds):
        own = [index for index, structure in enumerate(foreign.layers) if structure == number]
        shown = ", ".join(map(str, own[:4])) + (", …" if len(own) > 4 else "")
        parts.append(f"{len(own)} with {kind.name or unnamed} (layers {shown})")
    return (Derived("kinds of layers", len(foreign.kinds), "layers: " + "; ".join(parts)),)
