"""SIGTERM as an exception, for commands that have something to undo.

Must not know what is undone.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TERMINATED = 128 + signal.SIGTERM


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit(143) in the main thread, where it would end the process at once."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(_TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
