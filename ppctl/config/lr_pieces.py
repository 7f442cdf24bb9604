"""The rows of `optim.lr_pieces`, and the names of the styles by which a learning rate falls.

Must not know the schema, which names them; `learning_rate.py` says what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ppctl.config.limits import Form
from ppctl.config.quantities import tokens

WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
STYLES = ("cosine", "linear", "constant", "inverse-square-root", "WSD", "piecewise")


class GivenPiece(NamedTuple):
    """A row of `optim.lr_pieces`. It ends at `steps` updates, or after `tokens`."""

    style: str
    steps: int
    tokens: float | None
    lr: float | None


def read_piece(row: Any) -> GivenPiece:
    """A row as {style: constant|linear|cosine, until: STEPS or "10T tokens", lr: RATE}. Raises ValueError."""
    if not isinstance(row, Mapping) or not {"style", "until"} <= set(row) <= {"style", "until", "lr"}:
        raise ValueError(f"{row!r} is not a piece: it needs style and until, and may have lr")
    style, until, lr = row["style"], row["until"], row.get("lr")
    if style not in ("constant", "linear", "cosine"):
        raise ValueError(f"the style of a piece is constant, linear or cosine, not {style!r}")
    if lr is not None and (isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < math.inf):
        raise ValueError(f"a rate is a number, at least 0, not {lr!r}")
    if isinstance(until, str):
        return GivenPiece(style, 0, tokens(until), lr)
    if isinstance(until, bool) or not isinstance(until, int) or until < 1:
        raise ValueError(f"a piece ends after a number of steps, or after tokens as '10T tokens', not {until!r}")
    return GivenPiece(style, until, None, lr)


def _read_pieces(rows: Any) -> object:
    if not rows:
        raise ValueError(rows)
    return [read_piece(row) for row in rows]


PIECES = Form('rows as {style: cosine, until: "10T tokens", lr: 2e-5}: constant, linear or cosine', _read_pieces)
