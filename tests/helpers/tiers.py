"""The tests that `make test` leaves to `make test-all`, as `tests/left_to_test_all.txt` lists them.

Whoever adds tests beyond the ten minutes of `make test` moves others into that file. Grids say by themselves which of
their rows are `whole` (`pairwise.in_tiers`).
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def mark_whole(items: Sequence[pytest.Item], lines: Sequence[str], *, complete: bool) -> None:
    """Mark the tests that the file's `lines` name as `whole`.

    Raises UsageError if a line names a case that a collected test does not have, where the collection is `complete`:
    all cases of the tests in it are there.
    """
    kept = {line[1:] for line in lines if line.startswith("!")}
    left = {line for line in lines if not line.startswith(("!", "#"))}
    collected = {item.nodeid for item in items}
    tests = {_test(name) for name in collected}
    for item in items:
        if item.nodeid not in kept and (item.nodeid in left or _test(item.nodeid) in left):
            item.add_marker(pytest.mark.whole)
    gone = sorted(name for name in (kept | left) - collected - tests if _test(name) in tests)
    if complete and gone:
        raise pytest.UsageError(f"tests/left_to_test_all.txt names what is no test: {', '.join(gone)}")


def _test(name: str) -> str:
    """The id without its case."""
    return name.partition("[")[0]
