"""Tables of plain text: the one renderer of every table that a command prints. Standard library only.

Knows cells and widths. Must not know what is in a cell.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """Columns with two blanks between them; the second up to number `right` are aligned right, the others left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(index: int, cell: str) -> str:
        return cell.rjust(widths[index]) if 0 < index < right else cell.ljust(widths[index])

    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows)
