"""Rank 0's output, passed on line by line by a thread, so that a stopped terminal never blocks the launcher.

Knows pipes. Must not know what the lines say.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import IO, TextIO

from ppctl.files import silence

_LAST_LINES = 2.0
"""Seconds to wait for the end of the output, once the rank is gone."""


class Pump:
    """Copies `source` to `out` until it ends. When `out`'s reader has left, the rest is read and dropped."""

    def __init__(self, source: IO[bytes] | None, out: TextIO) -> None:
        self._source = source
        self._out = out
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the last lines."""
        self._thread.join(_LAST_LINES)

    def _run(self) -> None:
        broken = False
        for line in self._source or ():
            if not broken:
                try:
                    self._out.write(line.decode(errors="replace"))
                    self._out.flush()
                except (OSError, ValueError) as error:
                    broken = True
                    silence(self._out)
                    _tell_lost(error)


def _tell_lost(error: Exception) -> None:
    """Say on stderr, if that is still there, that the lines are lost and the run is not."""
    why = error.strerror if isinstance(error, OSError) else error
    with suppress(OSError, ValueError):
        text = f"note: stdout takes no more lines ({why}), and the run goes on; ppctl logs -f shows it, kill "
        print(f"{text}{os.getpid()} saves and ends it", file=sys.stderr, flush=True)
