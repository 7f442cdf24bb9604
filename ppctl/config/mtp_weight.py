"""The weight of the MTP losses as a function of the steps done: pieces, each until a step, and what follows them.

Must not know the schema, which names the form of a piece, nor modules.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from ppctl.config.batch_sizes import StepsFor, steps_for_tokens
from ppctl.config.limits import Form
from ppctl.config.quantities import tokens

if TYPE_CHECKING:
    from ppctl.config.schema import ModelConfig, RunConfig


class Piece(NamedTuple):
    """A weight until so many steps are done, or tokens consumed."""

    steps: int
    tokens: float | None
    weight: float

    def until(self, steps_for: StepsFor) -> int:
        """The completed steps at which it ends."""
        return self.steps if self.tokens is None else steps_for(self.tokens)


def read_piece(row: Any) -> Piece:
    """A row as {until: STEPS or "10T tokens", weight: W}. Raises ValueError."""
    if not isinstance(row, Mapping) or set(row) != {"until", "weight"}:
        raise ValueError(f"{row!r} is not a piece: it has until and weight")
    until, weight = row["until"], row["weight"]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
        raise ValueError(f"a weight is a number, at least 0, not {weight!r}")
    if isinstance(until, str):
        return Piece(0, tokens(until), float(weight))
    if isinstance(until, bool) or not isinstance(until, int) or until < 1:
        raise ValueError(f"a piece ends after a number of steps, or after tokens as '10T tokens', not {until!r}")
    return Piece(until, None, float(weight))


def _read_pieces(rows: Any) -> object:
    if not isinstance(rows, list | tuple) or not rows:
        raise ValueError(rows)
    return [read_piece(row) for row in rows]


PIECES = Form('rows as {until: "10T tokens", weight: 0.3}', _read_pieces)


def mtp_weight(step: int, model: ModelConfig, steps_for: StepsFor) -> float:
    """The weight in the step that follows `step` completed ones."""
    pieces = map(read_piece, model.mtp_loss_scaling_pieces or ())
    return next((each.weight for each in pieces if step < each.until(steps_for)), model.mtp_loss_scaling_factor)


def broken_rules(config: RunConfig) -> Iterator[tuple[tuple[str, ...], str, str]]:
    """(keys, what is wrong, remedy) of pieces that end where another one has ended already."""
    key, rows = "model.mtp_loss_scaling_pieces", config.model.mtp_loss_scaling_pieces
    if rows is None:
        return
    steps_for = steps_for_tokens(config)
    ends = [read_piece(row).until(steps_for) for row in rows]
    if any(after <= before for before, after in pairwise(ends)):
        shown = ", ".join(f"{end:,}" for end in ends)
        message = f"the weights of the MTP losses end after {shown} steps: each must end later than the one before"
        yield (key,), message, f"{key}=null"
