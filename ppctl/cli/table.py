"""Tables and lines of plain text, as wide as they may be: every command prints its own with them.

Knows cells, words and widths; only the standard library. Must not know what is in a cell.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """Columns with two blanks between them; the second up to number `right` are aligned right, the others left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(index: int, cell: str) -> str:
        return cell.rjust(widths[index]) if 0 < index < right else cell.ljust(widths[index])

    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows)


def fits(text: str, width: int) -> bool:
    """Whether no line of `text` is longer than `width`."""
    return max(map(len, text.splitlines()), default=0) <= width


def folded(rows: Iterable[Sequence[str]], width: int, mark: str) -> list[list[str]]:
    """Rows that `aligned` makes no wider than `width`, if that can be: last cells go on in rows below at `mark`s."""
    rows = [list(row) for row in rows]
    room = (
        width
        - len(mark.rstrip())
        - sum(max(map(len, column)) + 2 for column in zip(*(row[:-1] for row in rows), strict=True))
    )
    found = []
    for *ahead, last in rows:
        lines = [""]
        for part in last.split(mark):
            longer = lines[-1] + mark + part if lines[-1] else part
            lines[-1:] = [longer] if len(longer) <= room or not lines[-1] else [lines[-1] + mark.rstrip(), part]
        found += [[*ahead, lines[0]], *([*[""] * len(ahead), line] for line in lines[1:])]
    return found


def prose(lines: Iterable[str], width: int) -> str:
    """Lines of words, wrapped between words at `width`; continued lines are indented by two more columns."""
    return "\n".join("\n".join(_wrapped(line, width)) for line in lines)


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def in_blocks(rows: Iterable[Sequence[str]], width: int) -> str:
    """`aligned` columns; those beyond `width` go on in tables below, each with the first column again."""
    rows = [list(row) for row in rows]
    sizes = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    blocks: list[list[int]] = [[]]
    for index in range(1, len(sizes)):
        if blocks[-1] and sizes[0] - 2 + sum(sizes[i] for i in (*blocks[-1], index)) > width:
            blocks.append([])
        blocks[-1].append(index)
    return "\n\n".join(aligned([row[0], *(row[i] for i in block)] for row in rows) for block in blocks)
