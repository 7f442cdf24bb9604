"""One rank's file of a checkpoint: safetensors, written as the values come, with the digests of what was written.

Knows the format of the file. Must not know ranks, tensors of torch or what the values mean. The digests are those of
the bytes in memory, not of what can be read back: what a disk or a network loses on the way is found by them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.manifest import CHUNK, DTYPES, FORMAT, FileRecord, ShardRecord


class Part(NamedTuple):
    """A box of a tensor, by the tensor's name, its whole shape, and its dtype by torch's name."""

    name: str
    whole: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def bytes(self) -> int:
        """Bytes of its values. Raises KeyError for a dtype that the format lacks."""
        return DTYPES[self.dtype][1] * prod(self.box.shape)

    @property
    def key(self) -> str:
        """Its name in the file: the tensor's and, unless it is all of it, where it begins: `NAME@0,512`."""
        if self.box == Box.whole(self.whole):
            return self.name
        return f"{self.name}@{','.join(map(str, self.box.offset))}"


def text_of(shape: tuple[int, ...], dtype: str) -> str:
    """`float32[4, 8]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


class Written(NamedTuple):
    """A file as it was written, and where each part is in it, in the order of the parts."""

    record: FileRecord
    shards: list[ShardRecord]


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank-{rank:05}.safetensors"


def write(path: Path, parts: Sequence[Part], values: Iterable[memoryview]) -> Written:
    """Write a new file and bring it to the disk. `values` are the bytes of each part, asked for one after the other.

    Raises OSError, also where the file exists: what a writer of an earlier start still does never mixes with this.
    Raises ValueError where the values are not as long as the part says.
    """
    header, begins = _header(parts)
    shards = []
    with open(path, "xb", buffering=0) as stream:
        _write_all(stream.fileno(), memoryview(header))
        for part, begin, data in zip(parts, begins, values, strict=True):
            if len(data) != part.bytes:
                raise ValueError(f"{part.name} has {len(data)} bytes instead of {part.bytes}")
            digests = []
            for first in range(0, len(data), CHUNK):
                chunk = data[first : first + CHUNK]
                digests.append(xxh3_128(chunk).hexdigest())  # while it is in the cache
                _write_all(stream.fileno(), chunk)
            place = (begin, begin + len(data))
            shards.append(ShardRecord(path.name, place, part.box.offset, part.box.shape, tuple(digests)))
        os.fsync(stream.fileno())
        size = stream.tell()
    return Written(FileRecord(size, len(header), xxh3_128(header).hexdigest()), shards)


def _header(parts: Sequence[Part]) -> tuple[bytes, list[int]]:
    """The bytes in front of the values, and where in the file each part begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "ppctl": str(FORMAT)}}
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.bytes)
        dtype, _ = DTYPES[part.dtype]
        entries[part.key] = {"dtype": dtype, "shape": part.box.shape, "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values begin at a multiple of 8
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + end for end in ends[:-1]]


def _write_all(descriptor: int, data: memoryview) -> None:
    """A kernel may take less than all of it at once."""
    while data:
        data = data[os.write(descriptor, data) :]
