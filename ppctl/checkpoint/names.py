"""Names of tensors for people: in the order of their numbers, and many in one line.

Must not know what the names are of. Standard library only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DIGITS = re.compile(r"(\d+)")


def in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers within names by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


def ranges(names: Iterable[str]) -> list[str]:
    """Names, one line for all that differ in their first number only: `model.layers.{4-7,9}.attention.wq.weight`."""
    groups: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for name in names:
        match = _NUMBER.search(name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((name[: match.start()], name[match.end() :]), []).append(int(match[0]))
    return sorted(plain) + [
        f"{head}{_spans(sorted(set(found)))}{tail}" for (head, tail), found in sorted(groups.items())
    ]


def _spans(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}"
