"""The pairwise design of `make test-all` misses no pair of values that a grid holds, and is small."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import Row, in_tiers, pairwise

FREE = [*product("abcd", range(3), (True, False), range(5))]
BOUND = [(pp, vpp, m) for pp, vpp, m in product((1, 2, 4), (1, 2, 3), range(1, 10)) if vpp == 1 or m >= pp]
"""Some pairs are in no row: vpp 2 with a single microbatch, where pp is 2."""


def missed(grid: list[Row], design: list[Row]) -> list[tuple[int, object, int, object]]:
    """Pairs of values that a row of the grid has and none of the design, looked for one by one."""
    return [
        (a, row[a], b, row[b])
        for row in grid
        for a, b in combinations(range(len(row)), 2)
        if not any(each[a] == row[a] and each[b] == row[b] for each in design)
    ]


@pytest.mark.parametrize("grid", [FREE, BOUND], ids=["free", "bound"])
@pytest.mark.parametrize("seed", range(4))
def test_every_pair_that_a_row_of_the_grid_has_is_in_the_design(grid: list[Row], seed: int) -> None:
    for sample in ([], grid[:5]):
        design = pairwise(grid, sample, seed)
        assert missed(grid, design) == []
        assert design[: len(sample)] == sample
        assert set(design) <= set(grid)
        assert len(design) == len(set(design))


@pytest.mark.parametrize(("grid", "most"), [(FREE, 24), (BOUND, 32)], ids=["free", "bound"])
def test_a_design_is_much_smaller_than_its_grid(grid: list[Row], most: int) -> None:
    """The two longest axes alone have 20 and 27 pairs."""
    design = pairwise(grid)
    assert len(design) <= most < len(grid)
    assert missed(grid, design[:-1]), "the last row is needed too"


def test_one_seed_gives_one_design_and_another_seed_another() -> None:
    assert pairwise(FREE) == pairwise(FREE) != pairwise(FREE, seed=1)


def test_each_row_of_a_grid_is_in_one_tier() -> None:
    sample = FREE[7:9]
    tiers: dict[str, list[Row]] = {"": [], "whole": [], "soak": []}
    for each in in_tiers(FREE, sample):
        tiers["".join(mark.name for mark in each.marks)].append(each.values)
    assert tiers[""] == sample
    assert missed(FREE, [*sample, *tiers["whole"]]) == []
    assert sorted(row for rows in tiers.values() for row in rows) == sorted(FREE)
    assert len(tiers["soak"]) > 60
