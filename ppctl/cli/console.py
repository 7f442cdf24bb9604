"""What goes where: results to stdout, everything else to stderr, colour and live rendering only on a terminal.

Knows streams and rich, which it imports only when something is rendered. Must not know what is printed.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160
"""Columns where nobody watches: wide enough that tables do not wrap."""


def note(text: str) -> None:
    """Say something that is not the result."""
    print(text, file=sys.stderr, flush=True)


def is_live() -> bool:
    """Whether stdout is a terminal that may be redrawn."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


def console(*, stderr: bool = False) -> Console:
    """A rich console on stdout (or stderr) that honours NO_COLOR and does not wrap into a pipe."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        file=stream, width=None if stream.isatty() else PIPE_WIDTH, highlight=False, soft_wrap=not stream.isatty()
    )
