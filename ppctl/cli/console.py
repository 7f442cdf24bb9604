"""Where text goes and how wide it is: results to stdout, everything else to stderr; tables and lines of plain text.

Control characters of what is printed are shown as escapes, by the streams themselves (`VisibleText`). Only drawings
bypass these streams, on a terminal: rich's, and a line that overwrites itself.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TextIO

from ppctl.errors import visible

if TYPE_CHECKING:
    from rich.console import Console

    from ppctl.errors import Problem

_PLACE_INDENT = 2
PIPE_WIDTH = 160
"""Columns of text that goes into a pipe or a file: wide enough that tables do not wrap."""
_WIDEST_DRAWING = 1000
UNFOLDED = sys.maxsize
"""Columns of prose that goes into a pipe: programs read it line by line, unwrapped."""


class VisibleText:
    """A stream that shows control characters as escapes: printed text may come from anybody's file."""

    def __init__(self, below: TextIO) -> None:
        self.below = below
        """The stream for drawings, whose control characters are ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def write(self, text: str) -> int:
        """Print `text`."""
        return self.below.write(visible(text))


def _below(stream: TextIO) -> TextIO:
    return stream.below if isinstance(stream, VisibleText) else stream


def overwrite(text: str) -> None:
    """Show one line on stderr, a terminal; the next output overwrites it."""
    shown = visible(text, "")[: shutil.get_terminal_size().columns - 1]
    print(f"\r\033[K{shown}\r", end="", file=_below(sys.stderr), flush=True)


def note(text: str) -> None:
    """Print on stderr a text that is not the result. On a terminal, lines are wrapped between words, except indented
    lines, which a user may paste."""
    if sys.stderr.isatty():
        text = _unless_indented(text, shutil.get_terminal_size().columns)
    print(visible(text), file=sys.stderr, flush=True)  # looked up at each call: rich replaces it while it draws


def _unless_indented(text: str, columns: int) -> str:
    return "\n".join(line if line[:1].isspace() else prose([line], columns) for line in text.splitlines())


def print_problems(problems: Iterable[Problem]) -> None:
    """Print each problem once on stderr. On a terminal the lines of its place are wrapped between words, except
    indented lines and lines above a caret. The remedy, which a user may paste, is not wrapped."""
    for problem in dict.fromkeys(problems):
        place = problem.place
        if sys.stderr.isatty() and "^" not in place:
            place = _unless_indented(place, shutil.get_terminal_size().columns - _PLACE_INDENT)
        note(f"error {replace(problem, place=place)}")


def is_live() -> bool:
    """Whether stdout is a terminal that may be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def width(piped: int = PIPE_WIDTH) -> int:
    """The terminal's columns; if stdout is no terminal, $COLUMNS (unless `piped` is UNFOLDED), or else `piped`."""
    columns = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty():
        piped = shutil.get_terminal_size().columns
    elif piped != UNFOLDED and columns.isdecimal() and int(columns) > 0:
        piped = int(columns)
    return piped if piped == UNFOLDED else min(piped, _WIDEST_DRAWING)


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout (or stderr) that honours NO_COLOR and does not wrap into a pipe."""
    from rich.console import Console

    stream = _below(sys.stderr if stderr else sys.stdout)
    columns = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=columns, highlight=False, soft_wrap=not stream.isatty())


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with numbers of bytes done; the sum is drawn as a bar if stderr is a terminal."""
    if not sys.stderr.isatty() or not total:
        yield lambda size: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
    with Progress("{task.description}", *columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(visible(what), total=total)
        yield lambda size: bar.advance(task, size)


# Tables and lines


def aligned(rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """Columns with two blanks between them; columns 2 to `right` are aligned right, the others left."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def pad(index: int, cell: str) -> str:
        return cell.rjust(widths[index]) if 0 < index < right else cell.ljust(widths[index])

    return "\n".join("  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows)


def fits(text: str, width: int) -> bool:
    """Whether no line of `text` is longer than `width`."""
    return max(map(len, text.splitlines()), default=0) <= width


def folded(rows: Iterable[Sequence[str]], width: int, mark: str) -> list[list[str]]:
    """Rows that `aligned` keeps within `width`, if possible: last cells are cut at `mark`s and go on in rows below."""
    rows = [list(row) for row in rows]
    ahead_of_last = zip(*(row[:-1] for row in rows), strict=True)
    room = width - len(mark.rstrip()) - sum(max(map(len, column)) + 2 for column in ahead_of_last)
    lines_of_all = []
    for *ahead, last in rows:
        lines = [""]
        for part in last.split(mark):
            longer = lines[-1] + mark + part if lines[-1] else part
            lines[-1:] = [longer] if len(longer) <= room or not lines[-1] else [lines[-1] + mark.rstrip(), part]
        lines_of_all += [[*ahead, lines[0]], *([*[""] * len(ahead), line] for line in lines[1:])]
    return lines_of_all


def prose(lines: Iterable[str], width: int) -> str:
    """Lines of words, wrapped between words at `width`; continued lines are indented by two more columns."""
    return "\n".join("\n".join(_wrapped(line, width)) for line in lines)


def _wrapped(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    kept = _UNIT.sub("\u00a0", line)
    wrapped = textwrap.wrap(kept, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [each.replace("\u00a0", " ") for each in wrapped]


_UNIT = re.compile(r"(?<=[0-9]) (?=(?:s|ms|µs|[KMGT]iB|tokens/s|TFLOP/s)\b)")
"""The blank between a number and its unit, where no line breaks."""


def number(count: int, one: str, many: str = "") -> str:
    """`count` with a noun or verb: `one` for the singular, for the plural `many` (default: `one` with an s)."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def duration(seconds: float) -> str:
    """A time in three digits: in s, below a tenth in ms or µs."""
    size, unit = (1, "s") if seconds >= 0.1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    return f"{seconds * size:.3g} {unit}"


def in_blocks(rows: Iterable[Sequence[str]], width: int) -> str:
    """`aligned` columns; columns beyond `width` go on in tables below, each with the first column again."""
    rows = [list(row) for row in rows]
    sizes = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    blocks: list[list[int]] = [[]]
    for index in range(1, len(sizes)):
        if blocks[-1] and sizes[0] - 2 + sum(sizes[i] for i in (*blocks[-1], index)) > width:
            blocks.append([])
        blocks[-1].append(index)
    return "\n\n".join(aligned([row[0], *(row[i] for i in block)] for row in rows) for block in blocks)


_BARS = "▁▂▃▄▅▆▇█"


def curve(values: Sequence[float], columns: int, bounds: Iterable[float] = ()) -> str:
    """`values` as bars in at most `columns` columns, each the mean of equally many values (`!` if it is not finite).
    The scale is that of `bounds` (all values of several curves), or else of these means; equal means have low bars."""
    count = min(len(values), columns)
    edges = [len(values) * column // count for column in range(count + 1)] if count else []
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    finite = [*bounds] or [mean for mean in means if math.isfinite(mean)] or [0.0]
    least, span = min(finite), (max(finite) - min(finite)) or 1.0
    heights = [round((mean - least) / span * (len(_BARS) - 1)) if math.isfinite(mean) else None for mean in means]
    return "".join("!" if height is None else _BARS[height] for height in heights)
