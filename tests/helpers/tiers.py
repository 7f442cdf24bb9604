"""The tests that `make test` leaves to `make test-all`, so that it ends within ten minutes on two quiet cores.

Of every kind of test here a smoke stays. Whoever adds tests beyond the ten minutes moves others here. Grids say by
themselves which of their rows are `whole` (`pairwise.in_tiers`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest

LEFT_TO_TEST_ALL: dict[str, Collection[str]] = {}
"""A test's id without its parameters -> the parameters that `make test` runs all the same."""


def mark_whole(items: Sequence[pytest.Item], *, complete: bool) -> None:
    """Mark the tests above as `whole`. Raises UsageError where parameters of a `complete` collection are not there."""
    missing = {name: set(kept) for name, kept in LEFT_TO_TEST_ALL.items()}
    collected = set()
    for item in items:
        name, _, parameters = item.nodeid.removesuffix("]").partition("[")
        if name not in missing:
            continue
        collected.add(name)
        if parameters in LEFT_TO_TEST_ALL[name]:
            missing[name].discard(parameters)
        else:
            item.add_marker(pytest.mark.whole)
    gone = [f"{name}[{one}]" for name in sorted(collected) for one in sorted(missing[name])]
    if complete and gone:
        raise pytest.UsageError(f"tests/helpers/tiers.py names what is no test: {', '.join(gone)}")
