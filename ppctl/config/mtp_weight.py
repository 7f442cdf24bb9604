"""The weight of the MTP losses as a function of the steps done: pieces, each until a step, and what follows them.

Must not know modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from ppctl.config.batch_sizes import StepsFor, steps_for_tokens
from ppctl.config.mtp_pieces import Piece, read_piece
from ppctl.config.schema import ModelConfig, RunConfig


def mtp_weight(step: int, model: ModelConfig, steps_for: StepsFor) -> float:
    """The weight in the step that follows `step` completed ones."""
    pieces = map(read_piece, model.mtp_loss_scaling_pieces or ())
    return next((each.weight for each in pieces if step < _until(each, steps_for)), model.mtp_loss_scaling_factor)


def _until(piece: Piece, steps_for: StepsFor) -> int:
    """The completed steps at which it ends."""
    return piece.steps if piece.tokens is None else steps_for(piece.tokens)


def broken_rules(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(keys, what is wrong, remedy) of pieces that end where another one has ended already."""
    key, rows = "model.mtp_loss_scaling_pieces", config.model.mtp_loss_scaling_pieces
    if rows is None:
        return
    steps_for = steps_for_tokens(config)
    ends = [_until(read_piece(row), steps_for) for row in rows]
    if any(after <= before for before, after in pairwise(ends)):
        shown = ", ".join(f"{end:,}" for end in ends)
        message = f"the weights of the MTP losses end after {shown} steps: each must end later than the one before"
        yield (key,), message, f"{key}=null"
