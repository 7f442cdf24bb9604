"""A rank's stdout and stderr: a full disk does not end its training, and `--json` prints one object alone.

Knows the standard streams. Must not know what is printed, nor what else a full disk stops (`metrics.jsonl` does).
"""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _LossyFile(io.FileIO):
    """A file that drops what its disk has no room for."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write all of `data`, or drop all of it."""
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            return memoryview(data).nbytes


def lose_lines_rather_than_fail() -> None:
    """From now on stdout and stderr drop what does not fit on a full disk."""
    sys.stdout, sys.stderr = (_lossy(number) for number in (1, 2))


def _lossy(number: int) -> io.TextIOWrapper:
    raw = _LossyFile(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)


def keep_stdout() -> TextIO:
    """Stdout as it was; what this process and its libraries write to stdout from now on goes to stderr."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept
