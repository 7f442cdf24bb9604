"""The value of `train.batch_rampup`: how a batch grows.

Must not know the schema, which names its form; `batch_sizes.py` says what it means.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ppctl.config.limits import MOST_SAMPLES, Form

MOST_SIZES = 256
"""Sizes of a batch that grows: each has a schedule of its own."""


class Rampup(NamedTuple):
    """A batch that grows from `start` by `increment` until `samples` are consumed, each size for as many of these."""

    start: int
    increment: int
    samples: int

    def sizes(self, full: int) -> range:
        """Every size before `full`, which follows."""
        return range(self.start, full, self.increment)


def read_rampup(value: Any) -> Rampup:
    """[START, INCREMENT, SAMPLES]. Raises ValueError."""
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise ValueError(value)
    if any(type(number) is not int or number < 1 for number in value) or value[0] > MOST_SAMPLES:
        raise ValueError(value)
    return Rampup(*value)


RAMPUP = Form("[START, INCREMENT, SAMPLES], whole numbers above 0", read_rampup, "[1, 1, 1000]")
