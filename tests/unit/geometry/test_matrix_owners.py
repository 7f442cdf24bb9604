"""Who owns which matrix: every one once, balanced by the iteration's operations, the same on every rank."""

import random

import pytest

from ppctl.geometry.matrix_owners import Matrices, deal, owned_runs

SHAPES = {"w1": (6, 8, 32), "wq": (32, 32), "router": (6, 32), "w2": (6, 32, 8), "wo": (32, 32)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 40])
def test_every_element_belongs_to_one_rank_and_a_matrix_is_not_divided(ranks):
    for name, owned in owned_runs(SHAPES, ranks).items():
        *number, rows, columns = SHAPES[name]
        runs = list(owned.values())
        assert [element for run in runs for element in run] == list(range((number or [1])[0] * rows * columns))
        assert all(run.start % (rows * columns) == 0 and len(run) % (rows * columns) == 0 and run for run in runs)
        assert list(owned) == sorted(owned) and max(owned) < ranks


def test_a_square_matrix_weighs_more_than_a_flat_one_of_as_many_elements():
    square, flat = Matrices(64, 64), Matrices(16, 256)
    assert square.size == flat.size and square.operations > 3 * flat.operations
    owned = owned_runs({"flat": (2, 16, 256), "square": (64, 64)}, 2)
    assert owned == {"square": {0: range(4096)}, "flat": {1: range(2 * 4096)}}


def test_no_rank_has_more_than_graham_allows():
    dice = random.Random(67)
    for _ in range(50):
        entries = [Matrices(dice.randrange(4, 99), dice.randrange(4, 99), dice.randrange(1, 9)) for _ in range(12)]
        ranks = dice.randrange(1, 9)
        dealt = deal(entries, ranks)
        loads = [sum(e.operations * own[rank] for e, own in zip(entries, dealt, strict=True)) for rank in range(ranks)]
        total, longest = sum(loads), max(entry.operations for entry in entries)
        assert max(loads) <= max(longest, total / ranks + longest * (1 - 1 / ranks))
        assert [sum(own) for own in dealt] == [entry.number for entry in entries]
