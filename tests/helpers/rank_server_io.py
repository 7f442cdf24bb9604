"""Length-prefixed messages on pipes, for `ranks.py` and `rank_server.py`."""

from __future__ import annotations

import os
import struct


def read_message(fd: int) -> bytes | None:
    """One message, or None where the other end is gone."""
    header = _read_exactly(fd, 8)
    return None if header is None else _read_exactly(fd, struct.unpack("<q", header)[0])


def write_message(fd: int, data: bytes) -> None:
    view = memoryview(struct.pack("<q", len(data)) + data)
    while view:
        view = view[os.write(fd, view) :]


def _read_exactly(fd: int, size: int) -> bytes | None:
    parts = []
    while size:
        part = os.read(fd, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
