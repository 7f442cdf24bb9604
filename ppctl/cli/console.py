"""Where text goes: results to stdout, everything else to stderr; colour and live drawing only on a terminal.

Control characters of what is printed are shown as escapes, by the streams themselves (`VisibleText`). Only drawings
pass below them: rich's, and a line that overwrites itself.

Knows streams, widths and rich, which it imports only to draw. Must not know what is printed.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TextIO

from ppctl.cli.table import prose
from ppctl.errors import visible

if TYPE_CHECKING:
    from rich.console import Console

    from ppctl.errors import Problem

_PLACE_INDENT = 2
PIPE_WIDTH = 160
"""Columns of text that goes into a pipe or a file: wide enough that tables do not wrap."""
_WIDEST = 1000
"""Columns of any drawing."""
UNFOLDED = sys.maxsize
"""Columns of lines of words that go into a pipe: what reads them takes them line by line."""


class VisibleText:
    """A stream that shows control characters as escapes: what a command prints may be text of anybody's file."""

    def __init__(self, below: TextIO) -> None:
        self.below = below
        """Where drawings go, whose control characters are ours."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.below, name)

    def write(self, text: str) -> int:
        """Print `text`."""
        return self.below.write(visible(text))


def _below(stream: TextIO) -> TextIO:
    return stream.below if isinstance(stream, VisibleText) else stream


def overwrite(text: str) -> None:
    """Show one line on stderr, a terminal; what is printed next takes its place."""
    shown = visible(text, "")[: shutil.get_terminal_size().columns - 1]
    print(f"\r\033[K{shown}\r", end="", file=_below(sys.stderr), flush=True)


def note(text: str) -> None:
    """Print on stderr what is not the result. A terminal gets lines that end between words, but for indented ones,
    which are to be pasted."""
    if sys.stderr.isatty():
        text = _unless_indented(text, shutil.get_terminal_size().columns)
    print(visible(text), file=sys.stderr, flush=True)  # rich takes the place of the stream while it draws


def _unless_indented(text: str, columns: int) -> str:
    return "\n".join(line if line[:1].isspace() else prose([line], columns) for line in text.splitlines())


def print_problems(problems: Iterable[Problem]) -> None:
    """Print each problem once on stderr. On a terminal lines of its place end between words, but for those that are
    indented and where a caret points into one; these and the remedy are to be pasted."""
    for problem in dict.fromkeys(problems):
        place = problem.place
        if sys.stderr.isatty() and "^" not in place:
            place = _unless_indented(place, shutil.get_terminal_size().columns - _PLACE_INDENT)
        note(f"error {replace(problem, place=place)}")


def is_live() -> bool:
    """Whether stdout is a terminal that may be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def width(piped: int = PIPE_WIDTH) -> int:
    """The columns of the terminal; where stdout is none, of COLUMNS, or else `piped`. Words stay UNFOLDED there."""
    told = os.environ.get("COLUMNS", "")
    if sys.stdout.isatty():
        piped = shutil.get_terminal_size().columns
    elif piped != UNFOLDED and told.isdecimal() and int(told) > 0:
        piped = int(told)
    return piped if piped == UNFOLDED else min(piped, _WIDEST)


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout (or stderr) that honours NO_COLOR and does not wrap into a pipe."""
    from rich.console import Console

    stream = _below(sys.stderr if stderr else sys.stdout)
    wide = None if stream.isatty() else PIPE_WIDTH
    return Console(file=stream, width=wide, highlight=False, soft_wrap=not stream.isatty())


@contextmanager
def byte_progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that takes bytes as they are done, and shows them as a bar if stderr is a terminal."""
    if not sys.stderr.isatty() or not total:
        yield lambda size: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(visible(what), total=total)
        yield lambda size: bar.advance(task, size)
