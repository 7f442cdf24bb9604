"""The tests that `make test` leaves to `make test-all`, as `tests/left_to_test_all.txt` lists them.

Whoever adds tests beyond the ten minutes of `make test` moves others into that file. Grids say by themselves which of
their rows are `whole` (`pairwise.in_tiers`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest


def mark_whole(items: Sequence[pytest.Item], lines: Sequence[str], *, complete: bool) -> None:
    """Mark the tests that the file's `lines` name as `whole`.

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
            item.add_marker(pytest.mark.whole)
    gone = sorted(name for name in (kept | left | sampled.keys()) - collected - tests if _test(name) in tests)
    if complete and gone:
        raise pytest.UsageError(f"tests/left_to_test_all.txt names what is no test: {', '.join(gone)}")


def _test(name: str) -> str:
    """The id without its case."""
    return name.partition("[")[0]
