"""Values from a checkpoint's files, chunk by chunk; nothing is taken from a chunk before its digest is compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from ppctl.checkpoint.boxes import Box, Shape, boxes_of_run, common
from ppctl.checkpoint.manifest import CHUNK, Manifest, ShardRecord, changed, damaged
from ppctl.checkpoint.tensor_parts import DTYPES
from ppctl.errors import CheckpointError
from ppctl.host.files import open_regular

_Slices = tuple[slice, ...]


class ChunkPiece(NamedTuple):
    """A part of a wanted box. `data` is a contiguous array of `shape`; its values at `taken` belong at box[place]."""

    data: memoryview
    """The array's bytes, overwritten by the next chunk."""
    shape: Shape
    taken: _Slices
    place: _Slices


class ChunkReader:
    """Reads the chunks of one checkpoint, and has one chunk in memory at a time."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._chunk = bytearray(0)

    def pieces(self, name: str, wanted: Box) -> Iterator[ChunkPiece]:
        """Yield all pieces of the box `wanted` of a tensor. Raises CheckpointError (PP-E503) if bytes are not the
        saved ones, and OSError."""
        record = self.manifest.tensors[name]
        for shard in record.shards:
            if common(shard.box, wanted) is not None:
                yield from self._pieces(name, shard, DTYPES[record.dtype][1], wanted)

    def _pieces(self, name: str, shard: ShardRecord, width: int, wanted: Box) -> Iterator[ChunkPiece]:
        """Yield the parts of the box `wanted` in one shard, checking each chunk's digest first. `width` is the bytes of
        an element. Raises CheckpointError (PP-E503)."""
        first = shard.bytes[0]
        with open_regular(self.path / shard.file, follow=False) as stream:
            for begin, end, digest in shard.chunks():
                run = boxes_of_run(shard.shape, (begin - first) // width, (end - first) // width)
                boxes = [box.moved(shard.offset) for box in run]
                if not any(common(box, wanted) for box in boxes):
                    continue
                data, taken = self._checked(stream.fileno(), begin, end, digest), 0
                if data is None:
                    raise CheckpointError(damaged(self.path, changed(shard.file, begin, end, name)))
                for box in boxes:
                    values = data[taken : taken + box.size * width]
                    taken += len(values)
                    if shared := common(box, wanted):
                        yield ChunkPiece(values, box.shape, shared.within(box.offset), shared.within(wanted.offset))

    def faults(self, name: str, shard: ShardRecord) -> Iterator[tuple[int, str]]:
        """Read a shard's chunks of the tensor `name`; yield (size, what is wrong with it or ""). Raises OSError."""
        with open_regular(self.path / shard.file, follow=False) as stream:
            for begin, end, digest in shard.chunks():
                same = self._checked(stream.fileno(), begin, end, digest) is not None
                yield end - begin, "" if same else changed(shard.file, begin, end, name)

    def _checked(self, descriptor: int, begin: int, end: int, digest: str) -> memoryview | None:
        """Return the bytes of one chunk, valid until the next call; None if they differ from the saved bytes."""
        if len(self._chunk) < end - begin:
            self._chunk = bytearray(min(CHUNK, max(end - begin, 2 * len(self._chunk))))
        data = rest = memoryview(self._chunk)[: end - begin]
        while rest and (count := os.preadv(descriptor, [rest], begin)):
            rest, begin = rest[count:], begin + count  # a file that is too short is found by the digest
        return data if xxh3_128(data).hexdigest() == digest else None
