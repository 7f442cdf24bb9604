"""Bytes that layers of a model of transformers keep, and need while they run, from their measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ppctl.config.schema import ModelConfig
from ppctl.cost.setting import Setting
from ppctl.geometry.foreign_costs import LayerCost, measured_for, most
from ppctl.geometry.foreign_model import foreign_of
from ppctl.geometry.layers import LOSS_ROWS, Kind

_LABEL = 8
"""Bytes of a token's number, and of its label."""


def foreign_running(
    model: ModelConfig, kind: Kind, cost: LayerCost, setting: Setting
) -> tuple[float, float, float, float]:
    """Bytes that stay, that a recomputed layer makes again with its input, and beside in its forward and backward."""
    batch, length, hidden = setting.micro_batch_size, setting.seq_length, setting.hidden_bytes(model)
    inside = cost.kept.of(batch, length)
    stays = inside + (hidden if cost.keeps_input and kind.name != "embedding" else 0)
    forward = most(cost.in_forward, batch, length)
    backward = most(cost.in_inputs if setting.deferred else cost.in_backward, batch, length)
    if kind.name == "embedding":
        return inside + _LABEL * setting.tokens, 0.0, forward, backward
    if kind.name == "loss":  # the logits, whose gradient takes their place; blocks of them in float32
        block = setting.wide * min(LOSS_ROWS, setting.tokens) * model.vocab_size
        logits = setting.element * setting.tokens * model.vocab_size
        stays += logits + _LABEL * setting.tokens
        if cost.back is not None:  # measured with the gradient of the logits, which is gone after the head's product
            backward = max(0.0, backward - logits)
        # What the head puts out is in its forward: it stays.
        return stays, 0.0, max(forward - logits, 2 * block), max(backward, 3 * block + setting.wide * setting.tokens)
    return stays, inside + hidden, forward, backward


class Tables(NamedTuple):
    """Bytes of the tables that a stage's forward makes once for all of its layers."""

    made: float
    """With what else lives beside layers while they run forward."""
    kept: float
    """By the backwards of the stage's layers."""
    keeps_input: bool
    """Whether the first layer keeps what arrived."""


def foreign_tables(model: ModelConfig, kinds: Sequence[tuple[Kind, bool]], setting: Setting) -> Tables:
    """Bytes of the tables of layers (kind, whether it is recomputed); a recomputed one keeps its arguments."""
    foreign = foreign_of(model)
    assert foreign is not None
    measured = measured_for(foreign.measured, setting.element, setting.seq_length)
    kept: set[int] = set()
    keeps_input = False
    for place, (kind, recomputed) in enumerate(kinds):
        if (cost := measured.cost(kind.name, kind.structure)) is not None:
            kept |= {*(cost.reads if recomputed else cost.keeps)}
            keeps_input |= place == 0 and cost.keeps_input
    batch, length = setting.micro_batch_size, setting.seq_length
    made, held = (measured.tables_of(numbers, batch, length) for numbers in (range(len(measured.tables)), kept))
    return Tables(made + measured.before.of(batch, length), held, keeps_input)


def foreign_operands(cost: LayerCost, setting: Setting) -> tuple[float, float]:
    """Bytes that a split backward keeps for W, and further bytes that W needs while it runs."""
    batch, length = setting.micro_batch_size, setting.seq_length
    return cost.deferred.of(batch, length), most(cost.in_weights, batch, length)
