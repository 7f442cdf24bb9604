"""What a save does on the disk: a rank's file, and for rank 0 who writes what, the manifest and the commit.

Needs no torch: the writer of a node (`writer`) does it for its ranks, or a rank does it itself. Must not know where the
values lie, nor how ranks agree.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl import checkpoint_folder, wire
from ppctl.checkpoint import shard_file
from ppctl.checkpoint.holders import Writers, check_copies, choose_writers, parts_of
from ppctl.checkpoint.manifest import (
    DTYPES,
    FileRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
    digests_of,
    record_whole,
)
from ppctl.checkpoint.shard_file import Part
from ppctl.checkpoint_folder import MANIFEST, STATE
from ppctl.errors import CheckpointError, Problem
from ppctl.json_reader import without_collections

Values = Callable[[int], memoryview]
"""The bytes of a rank's shard, by its number."""


class Written(NamedTuple):
    """What a rank has done. Bare numbers and texts: rank 0 reads those of all ranks."""

    file: tuple[int, int, str] | None
    """Size, bytes of the header and their digest; None where the rank writes nothing."""
    begins: list[int]
    """Where in the file each of its own parts begins, in the order of its shards."""
    digests: list[str]
    """The chunks' digests of all shards that it holds, with blanks between."""


class Disk:
    """One rank's work on the disk. Ranks call `hold` and `write`; rank 0 alone all others."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.parts: Sequence[Part] = ()
        self._own = b""
        self._writers: Writers | None = None

    def choose(self, all_parts: Sequence[bytes]) -> tuple[bytes, ...]:
        """Decide which rank writes what, from the `packed_parts` of all ranks in rank order; `Writers.own`."""
        with without_collections():
            self._writers = choose_writers(list(map(parts_of, all_parts)))
        return self._writers.own

    def prepare(self, directory: Path, step: int) -> None:
        """Make the directory that ranks write into."""
        checkpoint_folder.prepare(directory, step)

    def hold(self, parts: bytes, own: bytes) -> None:
        """From now on the rank holds these `packed_parts`, and writes those of which `own` is 1."""
        self.parts, self._own = parts_of(parts), own

    def write(self, directory: Path, values: Values) -> bytes:
        """Write this rank's share and bring it to the disk, and read the rest for its digests; `Written` as bytes."""
        mine = [number for number, own in enumerate(self._own) if own]
        # The widest elements first: all of them then lie at multiples of their size.
        mine.sort(key=lambda number: -DTYPES[self.parts[number].dtype][1])
        record, places = None, dict[int, ShardRecord]()
        if mine:
            path = directory / shard_file.file_name(self.rank)
            parts = [self.parts[number] for number in mine]
            file, shards = shard_file.write(path, parts, map(values, mine))
            record, places = (file.bytes, file.header, file.digest), dict(zip(mine, shards, strict=True))
        found = [
            " ".join(places[number].digests if number in places else digests_of(values(number)))
            for number in range(len(self.parts))
        ]
        begins = [places[number].bytes[0] for number in sorted(places)]
        return wire.packed(Written, Written(record, begins, found))

    def commit(self, directory: Path, step: int, written: Sequence[bytes], state: bytes) -> Path:
        """Compare the copies, seal what all ranks have written and give it its name; the checkpoint's path.

        If an earlier call was killed, this one goes on where that one stopped.
        """
        assert self._writers is not None
        temporary = checkpoint_folder.temporary_path(directory, step)
        path = checkpoint_folder.step_path(directory, step)
        with without_collections():
            manifest = manifest_of(step, self._writers, [wire.unpacked(Written, each) for each in written])
            if temporary.is_dir():
                seal(temporary, manifest, state)
                return checkpoint_folder.publish(directory, step)
            if (path / MANIFEST).read_bytes() != _with_state(manifest, state).to_text().encode():
                raise FileNotFoundError(2, os.strerror(2), str(temporary))
        return checkpoint_folder.point_at(directory, step)

    def discard(self, path: Path) -> None:
        """Delete what a failed save has left."""
        checkpoint_folder.discard(path)

    def retain(self, directory: Path, step: int, keep: int, keep_every: int) -> None:
        """Delete checkpoints that are no longer kept."""
        checkpoint_folder.retain(directory, step, keep, keep_every)


def manifest_of(step: int, writers: Writers, written: Sequence[Written]) -> Manifest:
    """The manifest of what all ranks have written. Raises CheckpointError (PP-E504) where copies differ."""
    check_copies(writers, [each.digests for each in written])
    begins = [iter(each.begins) for each in written]
    of_rank = [dict(zip(_ones(own), begin, strict=True)) for own, begin in zip(writers.own, begins, strict=True)]
    names = [shard_file.file_name(rank) for rank in range(len(written))]
    shards: dict[str, list[ShardRecord]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for part, holders in writers.holders.items():
        rank, number = holders[0]
        begin, (offset, shape) = of_rank[rank][number], part.box
        record = ShardRecord(
            names[rank], (begin, begin + part.bytes), offset, shape, tuple(written[rank].digests[number].split())
        )
        shards.setdefault(part.name, []).append(record)
        kinds[part.name] = part.whole, part.dtype
    tensors = {
        name: TensorRecord(*kinds[name], tuple(sorted(found, key=lambda shard: (shard.offset, shard.shape))))
        for name, found in shards.items()
    }
    files = {names[rank]: FileRecord(*each.file) for rank, each in enumerate(written) if each.file is not None}
    return Manifest(step, files, tensors)


def seal(path: Path, manifest: Manifest, state: bytes) -> None:
    """Rank 0's part: state and manifest, synced, once every file is seen from here with all its bytes."""
    unseen = [name for name, record in manifest.files.items() if _size(path / name) != record.bytes]
    if unseen:
        message = f"files that other ranks wrote cannot be seen from rank 0: {', '.join(sorted(unseen))}"
        remedy = "log.dir=DIR on a file system that all hosts share"
        raise CheckpointError(Problem("PP-E508", message, remedy, place=str(path)))
    _write_synced(path / STATE, state)
    _write_synced(path / MANIFEST, _with_state(manifest, state).to_text().encode())
    checkpoint_folder.sync(path)


def _with_state(manifest: Manifest, state: bytes) -> Manifest:
    return Manifest(manifest.step, {**manifest.files, STATE: record_whole(state)}, manifest.tensors)


def _ones(own: bytes) -> list[int]:
    return [number for number, one in enumerate(own) if one]


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _write_synced(path: Path, text: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
