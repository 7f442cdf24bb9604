"""The tests that one tier leaves to the next: `make test` those of `tests/left_to_test_all.txt` to `make test-all`, and
this one those of `tests/left_to_soak.txt` to `make soak`.

Whoever adds tests beyond the ten minutes of `make test` or the hour of `make test-all` moves others into these files.
Grids say by themselves which of their rows are `whole` or `soak` (`pairwise.in_tiers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

LEFT = {"whole": "left_to_test_all.txt", "soak": "left_to_soak.txt"}
"""Marker -> the file of the tests that get it."""


def mark_tiers(items: Sequence[pytest.Item], directory: Path, *, complete: bool) -> None:
    """Mark `items` as the files in `directory` say. `make soak` runs nothing that `make test` runs, whatever a line
    says. Raises UsageError as `mark_left` does."""
    for mark, name in LEFT.items():
        lines = (directory / name).read_text().splitlines()
        of_this = items if mark == "whole" else [each for each in items if each.get_closest_marker("whole")]
        mark_left(of_this, lines, mark, complete=complete)


def mark_left(items: Sequence[pytest.Item], lines: Sequence[str], mark: str, *, complete: bool) -> None:
    """Mark the tests that the `lines` name.

    Raises UsageError if a line names a case that a collected test does not have, where the collection is `complete`:
    all cases of the tests in it are there.
    """
    kept = {line[1:] for line in lines if line.startswith("!")}
    sampled = {name: int(share[2:]) for share, _, name in (line.partition(" ") for line in lines if line[:2] == "1/")}
    left = {line for line in lines if not line.startswith(("!", "#", "1/"))}
    collected = {item.nodeid for item in items}
    tests, cases = {_test(name) for name in collected}, Counter[str]()
    for item in items:
        test = _test(item.nodeid)
        is_left = item.nodeid in left or test in left or cases[test] % sampled.get(test, 1) > 0
        cases[test] += 1
        if is_left and item.nodeid not in kept:
            item.add_marker(getattr(pytest.mark, mark))
    gone = sorted(name for name in (kept | left | sampled.keys()) - collected - tests if _test(name) in tests)
    if complete and gone:
        raise pytest.UsageError(f"tests/{LEFT[mark]} names what is no test: {', '.join(gone)}")


def _test(name: str) -> str:
    """The id without its case."""
    return name.partition("[")[0]
