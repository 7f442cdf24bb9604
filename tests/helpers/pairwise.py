"""A seeded pairwise design: a few rows of a grid that hold every pair of values of two axes which the grid holds."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable
from itertools import combinations
from typing import Any

import pytest

Row = tuple[Any, ...]


def pairs(row: Row) -> set[tuple[tuple[int, Any], ...]]:
    """Every two values of a row, each with the number of its axis."""
    return set(combinations(enumerate(row), 2))


def pairwise(grid: Iterable[Row], sample: Iterable[Row] = (), seed: int = 0) -> list[Row]:
    """`sample`, and what completes its pairs: greedily, the row with the most pairs that no row before it has.

    `grid` lists the valid rows, so that no pair is asked for which cannot be; of equally good rows a shuffle by `seed`
    decides.
    """
    rows, design = [*grid], [*sample]
    random.Random(seed).shuffle(rows)
    held = {row: pairs(row) for row in rows}
    missing = set().union(*held.values()).difference(*map(pairs, design))
    while missing:
        best = max(rows, key=lambda row: len(held[row] & missing))
        design.append(best)
        missing -= held[best]
    return design


def in_tiers(grid: Collection[Row], sample: Collection[Row] = ()) -> list[Any]:
    """Parameters: `make test` runs the sample, `make test-all` what completes its pairs, `make soak` the rest."""
    design = pairwise(grid, sample)
    marks = {row: () if row in sample else pytest.mark.whole for row in design}
    return [pytest.param(*row, marks=marks.get(row, pytest.mark.soak)) for row in dict.fromkeys([*sample, *grid])]
