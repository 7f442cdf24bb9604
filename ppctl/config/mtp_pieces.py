"""The rows of `model.mtp_loss_scaling_pieces`.

Must not know the schema, which names them; `mtp_weight.py` says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ppctl.config.limits import Form
from ppctl.config.quantities import tokens


class Piece(NamedTuple):
    """A weight until so many steps are done, or tokens consumed."""

    steps: int
    tokens: float | None
    weight: float


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
