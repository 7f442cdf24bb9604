"""The written form of values that change during a run: a batch that grows, a learning rate and a weight in pieces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from ppctl.config.metadata import MOST_SAMPLES, Form
from ppctl.config.quantities import tokens

WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
STYLES = ("cosine", "linear", "constant", "inverse-square-root", "WSD", "piecewise")

MOST_SIZES = 256
"""The most sizes of a growing batch: each has a schedule of its own."""


class Rampup(NamedTuple):
    """A batch that grows from `start` by `increment` while `samples` are consumed; each size holds for equally many."""

    start: int
    increment: int
    samples: int

    def sizes(self, full: int) -> range:
        """Every size before the last, `full`."""
        return range(self.start, full, self.increment)


def read_rampup(value: Any) -> Rampup:
    """The Rampup of [START, INCREMENT, SAMPLES]. Raises ValueError."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(value)
    if any(type(number) is not int or number < 1 for number in value) or value[0] > MOST_SAMPLES:
        raise ValueError(value)
    return Rampup(*value)


def read_piece(row: Any) -> tuple[str, int, float | None, float | None]:
    """Style, steps, tokens and rate of a row {style: constant|linear|cosine, until: STEPS or "10T tokens", lr: RATE}.
    The piece ends after so many updates or, if tokens are not None, after so many tokens. Raises ValueError."""
    if not isinstance(row, Mapping) or not {"style", "until"} <= set(row) <= {"style", "until", "lr"}:
        raise ValueError(f"{row!r} is not a piece: it needs style and until, and may have lr")
    style, lr = row["style"], row.get("lr")
    if style not in ("constant", "linear", "cosine"):
        raise ValueError(f"the style of a piece is constant, linear or cosine, not {style!r}")
    if lr is not None:
        _check_amount("rate", lr)
    return style, *_end(row["until"]), lr


def read_weight_piece(row: Any) -> tuple[int, float | None, float]:
    """Steps, tokens and weight of a row {until: STEPS or "10T tokens", weight: W}. Raises ValueError."""
    if not isinstance(row, Mapping) or set(row) != {"until", "weight"}:
        raise ValueError(f"{row!r} is not a piece: it has until and weight")
    _check_amount("weight", row["weight"])
    return *_end(row["until"]), float(row["weight"])


def _check_amount(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"a {name} is a number, at least 0, not {value!r}")


def _end(until: Any) -> tuple[int, float | None]:
    """(steps, None) or (0, tokens) of an end. Raises ValueError."""
    if isinstance(until, str):
        return 0, tokens(until)
    if isinstance(until, bool) or not isinstance(until, int) or until < 1:
        raise ValueError(f"a piece ends after a number of steps, or after tokens as '10T tokens', not {until!r}")
    return until, None


def _rows(words: str, read_row: Any) -> Form:
    def read(rows: Any) -> object:
        if not isinstance(rows, list | tuple) or not rows:
            raise ValueError(rows)
        return [read_row(row) for row in rows]

    return Form(words, read)


RAMPUP = Form("[START, INCREMENT, SAMPLES], whole numbers above 0", read_rampup, "[1, 1, 1000]")
LR_PIECES = _rows('rows as {style: cosine, until: "10T tokens", lr: 2e-5}: constant, linear or cosine', read_piece)
MTP_PIECES = _rows('rows as {until: "10T tokens", weight: 0.3}', read_weight_piece)
