"""The work of a save on the disk: each rank's file; on rank 0 also the choice of writers, the manifest and the commit.

Functions of plain values, without torch: the writer of a node (`writer`) runs them for its ranks, or a rank runs them
itself. Their annotations say how arguments and results are encoded on the way to the writer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from ppctl.checkpoint.manifest import (
    CHUNK,
    FORMAT,
    FileRecord,
    Manifest,
    ShardRecord,
    TensorRecord,
    digests_of,
    record_whole,
)
from ppctl.checkpoint.tensor_parts import DTYPES, TensorPart, Values, Writers, check_copies, choose_writers, parts_of
from ppctl.errors import CheckpointError, PpctlError, Problem
from ppctl.host.files import write_atomically
from ppctl.records import wire
from ppctl.records.json_reader import without_collections
from ppctl.runs import checkpoint_folder, fence
from ppctl.runs.checkpoint_folder import MANIFEST, STATE, discard, prepare, retain

WORK = "prepare", "choose", "write", "commit", "retain", "discard"
"""The functions of this file and of `checkpoint_folder` that a writer runs for its ranks, in the order of a save."""

__all__ = ["WORK", "discard", "prepare", "retain"]


class WrittenParts(NamedTuple):
    """The file that a rank has written, and digests of the rank's parts. Plain values: rank 0 reads all ranks'."""

    file: tuple[int, int, str] | None
    """The file's size, the bytes of its header and their digest; None if the rank writes nothing."""
    begins: list[int]
    """The offset in the file of each part that the rank writes, in the order of its parts."""
    digests: list[str]
    """The digests of the chunks of all parts that the rank holds, with blanks between."""


# On rank 0


def choose(all_parts: Sequence[bytes]) -> tuple[bytes, ...]:
    """Decide who writes what, by all ranks' `packed_parts` in rank order; returns `Writers.own`. Raises PP-E506."""
    return _writers(tuple(all_parts)).own


@lru_cache(maxsize=1)
def _writers(all_parts: tuple[bytes, ...]) -> Writers:
    """Return the writers of these parts; cached, since every save of a run has the same parts."""
    with without_collections():
        return choose_writers(list(map(parts_of, all_parts)))


def commit(directory: Path, step: int, all_parts: Sequence[bytes], reports: Sequence[bytes], state: bytes) -> Path:
    """Compare copies, write the manifest and give the checkpoint its name; returns its path. Goes on where an earlier
    call was killed. Raises CheckpointError, OSError, and TrainingError (PP-E779) in a process of an older start."""
    temporary = checkpoint_folder.temporary_path(directory, step)
    path = checkpoint_folder.step_path(directory, step)
    writers = _writers(tuple(all_parts))
    with without_collections():
        manifest = manifest_of(step, writers, [wire.unpacked(WrittenParts, each) for each in reports])
        if temporary.is_dir():
            seal(temporary, manifest, state)
        elif (path / MANIFEST).read_bytes() != _with_state(manifest, state).to_text().encode():
            raise FileNotFoundError(2, os.strerror(2), str(temporary))
    fence.check(at_once=True)
    return checkpoint_folder.publish(directory, step)


def manifest_of(step: int, writers: Writers, reports: Sequence[WrittenParts]) -> Manifest:
    """Return the manifest of what all ranks have written. Raises CheckpointError (PP-E504) if copies differ."""
    check_copies(writers, [each.digests for each in reports])
    begins = [iter(each.begins) for each in reports]
    of_rank = [
        {number: next(begin) for number, one in enumerate(own) if one}
        for own, begin in zip(writers.own, begins, strict=True)
    ]
    names = [file_name(rank) for rank in range(len(reports))]
    shards: dict[str, list[ShardRecord]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for part, holders in writers.holders.items():
        rank, number = holders[0]
        begin, (offset, shape) = of_rank[rank][number], part.box
        digests = tuple(reports[rank].digests[number].split())
        record = ShardRecord(names[rank], (begin, begin + part.bytes), offset, shape, digests)
        shards.setdefault(part.name, []).append(record)
        kinds[part.name] = part.whole, part.dtype
    tensors = {
        name: TensorRecord(*kinds[name], tuple(sorted(each, key=lambda shard: (shard.offset, shard.shape))))
        for name, each in shards.items()
    }
    files = {names[rank]: FileRecord(*each.file) for rank, each in enumerate(reports) if each.file is not None}
    return Manifest(step, files, tensors)


def seal(path: Path, manifest: Manifest, state: bytes) -> None:
    """Write and sync state and manifest. Raises CheckpointError (PP-E508) if this host does not see all of a file."""
    files = manifest.files.items()
    unseen = [name for name, one in files if not (path / name).is_file() or (path / name).stat().st_size != one.bytes]
    if unseen:
        message = f"files that other ranks wrote cannot be seen from rank 0: {', '.join(sorted(unseen))}"
        remedy = "log.dir=DIR on a file system that all hosts share"
        raise CheckpointError(Problem("PP-E508", message, remedy, place=str(path)))
    write_atomically(path / STATE, state)
    write_atomically(path / MANIFEST, _with_state(manifest, state).to_text())
    checkpoint_folder.sync(path)


def _with_state(manifest: Manifest, state: bytes) -> Manifest:
    return Manifest(manifest.step, {**manifest.files, STATE: record_whole(state)}, manifest.tensors)


# On every rank


def write(rank: int, directory: Path, parts: Sequence[TensorPart], own: bytes, values: Values) -> bytes:
    """Write and sync the parts that have a 1 in `own`, and read the others for their digests. Returns the packed
    WrittenParts. Raises what `write_file` raises."""
    mine = [number for number, one in enumerate(own) if one]
    # The widest elements first: then every element lies at a multiple of its size.
    mine.sort(key=lambda number: -DTYPES[parts[number].dtype][1])
    record, records = None, dict[int, ShardRecord]()
    if mine:
        file, shards = write_file(directory / file_name(rank), [parts[number] for number in mine], map(values, mine))
        record, records = (file.bytes, file.header, file.digest), dict(zip(mine, shards, strict=True))
    digests = [
        " ".join(records[number].digests if number in records else digests_of(values(number)))
        for number in range(len(parts))
    ]
    begins = [records[number].bytes[0] for number in sorted(records)]
    return wire.packed(WrittenParts, WrittenParts(record, begins, digests))


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05}.safetensors"


def write_file(
    path: Path, parts: Sequence[TensorPart], values: Iterable[memoryview]
) -> tuple[FileRecord, list[ShardRecord]]:
    """Write and sync a new safetensors file; returns its record, and where each part is in it.

    `values` yields the bytes of each part. Digests are of the bytes in memory, and so show what a disk or a network
    loses on the way. Raises OSError, also if the file exists: a writer of an earlier start may still be writing it.
    Raises ValueError if values are not as long as their part says.
    """
    header, begins = header_of(parts, ppctl=str(FORMAT))
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
    return FileRecord(size, len(header), xxh3_128(header).hexdigest()), shards


def header_of(parts: Sequence[TensorPart], *, aligned: int = 8, **metadata: str) -> tuple[bytes, list[int]]:
    """Return the header of a safetensors file, padded so that values begin at a multiple of `aligned`, and where in the
    file each part begins."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.bytes)
        dtype, _ = DTYPES[part.dtype]
        entries[part.key] = {"dtype": dtype, "shape": part.box.shape, "data_offsets": ends[-2:]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % aligned)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + end for end in ends[:-1]]


def _write_all(descriptor: int, data: memoryview) -> None:
    """Write all of `data`: the kernel may take less in one call."""
    while data:
        data = data[os.write(descriptor, data) :]


# Failures


def problems_of(error: BaseException, what: str, rank: int) -> tuple[Problem, ...]:
    """Return an exception as problems: its own, or that the rank failed to do `what` (disk: PP-E505, else PP-E507)."""
    if isinstance(error, PpctlError):
        return error.problems
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        place = str(error.filename) if error.filename else ""
        remedy = "free space or mend the directory (`df -h`, `ls -ld`), then `ppctl resume`"
        return (Problem("PP-E505", f"rank {rank} could not {what}: {reason}", remedy, place),)
    message = f"rank {rank} failed to {what}: {type(error).__name__}: {error}"
    return (Problem("PP-E507", message, remedy=f"see the traceback in logs/rank-{rank:04d}.log"),)
