"""What a rank prints must not end its training: where the disk of its log is full, lines are lost.

Knows the standard streams. Must not know what is printed, nor what else a full disk stops (`metrics.jsonl` does).
"""

from __future__ import annotations

import errno
import io
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class _Lossy(io.FileIO):
    """A file that drops what its disk has no room for."""

    def write(self, data: ReadableBuffer, /) -> int:
        """All of it is written, or as good as."""
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
    raw = _Lossy(number, "w", closefd=False)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True)
