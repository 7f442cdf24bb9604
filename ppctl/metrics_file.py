"""metrics.jsonl as it grows: every record once, also of a file of gigabytes or of lines that are none.

Must not know the run, nor what the figures mean.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ppctl.files import open_regular
from ppctl.json_reader import parse, read
from ppctl.run_records import Metrics

_LONGEST = 2**16
_TAIL = 2**18
"""Bytes at the end of a file that have its last steps: a record has less than two thousand."""


class MetricsFile:
    """Reads what was added since it read last; at first all, or with `tail` the last records."""

    def __init__(self, path: Path, damaged: Callable[[object], None], *, tail: bool = False, at: int = 0) -> None:
        """`damaged` takes the reason why the file, or the first such line, was left out."""
        self._path, self._damaged, self._tail, self._at = path, damaged, tail, at

    def read(self) -> list[dict[str, Any]]:
        """The records, without lines that are none. A last line without an end is still being written, or was cut by a
        crash."""
        found: list[dict[str, Any]] = []
        fault: object = None
        try:
            with open_regular(self._path, follow=False) as file:
                size = os.fstat(file.fileno()).st_size
                self._at = min(self._at, size)  # a resumed run drops the steps that it repeats
                if self._tail and self._at < size - _TAIL:
                    file.seek(size - _TAIL)
                    self._at = size - _TAIL + len(file.readline(_LONGEST))
                file.seek(self._at)
                for line in iter(partial(file.readline, _LONGEST), b""):
                    if not line.endswith(b"\n") and len(line) < _LONGEST:
                        break
                    self._at += len(line)
                    try:
                        found.append(dict(read(Metrics, parse(line))))
                    except ValueError as error:
                        fault = fault or f"{error} (before byte {self._at})"
        except FileNotFoundError:
            return []
        except OSError as error:
            fault = error.strerror
        if fault is not None:
            self._damaged(fault)
        return found
