"""The lines of metrics.jsonl, and its reader while it grows: every record once, even if the file has gigabytes or
damaged lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import Any

from ppctl.host.files import open_regular
from ppctl.records.json_reader import finite, parse, read
from ppctl.records.run_records import Metrics

_LONGEST = 2**16
_LEAST_TAIL_BYTES = 2**18
_MOST_OF_A_RECORD = 2**11
_MOST_DAMAGED = 1000
"""The most lines without a record; after more, the rest is not read: a file of 200 MB may have only such lines."""


def line_of(record: Mapping[str, Any]) -> str:
    """The line of a record, numbers that are not finite as null. Raises TypeError and ValueError for a record that
    readers of the file would leave out."""
    line = json.dumps(finite(record)) + "\n"
    if len(line) > _LONGEST:
        raise ValueError(f"the record has more than {_LONGEST // 2**10} KiB as JSON")
    read(Metrics, parse(line.encode()))
    return line


class MetricsFile:
    """Reads the records that were added since its last read; at first all, or at least the `last` newest ones."""

    def __init__(self, path: Path, damaged: Callable[[object], None], *, last: int | None = None, at: int = 0) -> None:
        """Reads from byte `at` on. Calls `damaged` with the reason why the file or its first bad line is left out."""
        self._path, self._damaged, self._at = path, damaged, at
        self._tail = None if last is None else max(_LEAST_TAIL_BYTES, last * _MOST_OF_A_RECORD)

    def read(self) -> list[dict[str, Any]]:
        """The new records, without damaged lines. An unfinished last line stays for the next read."""
        try:
            with open_regular(self._path, follow=False) as file:
                return [record for _, record in self._added(file)]
        except FileNotFoundError:
            return []
        except OSError as error:
            self._damaged(error.strerror)
            return []

    def drop_from(self, step: int) -> None:
        """Cut the file before its first record of `step` or later, else after its last whole line. Raises OSError."""
        with open_regular(self._path, follow=False) as file:
            size, self._tail = os.fstat(file.fileno()).st_size, _LEAST_TAIL_BYTES
            while True:
                self._at = 0
                records = self._added(file)
                if self._tail >= size or (records and records[0][1]["step"] < step):
                    break
                self._tail *= 8
        os.truncate(self._path, next((begin for begin, record in records if record["step"] >= step), self._at))

    def _added(self, file: BufferedReader) -> list[tuple[int, dict[str, Any]]]:
        """(the byte where it begins, record) of each record that was added; moves `_at` behind them."""
        records: list[tuple[int, dict[str, Any]]] = []
        faults: list[str] = []
        size = os.fstat(file.fileno()).st_size
        self._at = min(self._at, size)  # a resumed run drops the records of repeated steps
        if self._tail is not None and self._at < size - self._tail:
            file.seek(size - self._tail)
            self._at = size - self._tail + len(file.readline(_LONGEST))
        file.seek(self._at)
        for line in iter(partial(file.readline, _LONGEST), b""):
            if not line.endswith(b"\n") and len(line) < _LONGEST:
                break
            begin, self._at = self._at, self._at + len(line)
            try:
                records.append((begin, dict(read(Metrics, parse(line)))))
            except ValueError as error:
                faults.append(f"{error} (before byte {self._at})")
                if len(faults) > _MOST_DAMAGED:
                    self._at = size
                    break
        if faults:
            self._damaged(faults[0])
        return records
