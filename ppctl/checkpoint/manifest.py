"""The manifest: where in the files each part of each tensor is, and the digests of all bytes.

`docs/checkpoint.md` has the format. Needs no torch, so that a checkpoint can be verified where torch is not installed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from itertools import groupby, islice
from math import prod
from pathlib import Path
from typing import Annotated, Any, TypedDict

from xxhash import xxh3_128

from ppctl.checkpoint.boxes import Box, tiling_fault
from ppctl.checkpoint.tensor_parts import DTYPES
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.host.files import MOST_READ, MOST_READ_OF_A_MODEL, ODD, open_regular, read_whole
from ppctl.records.json_reader import Count, Line, parse, read, without_collections
from ppctl.runs import checkpoint_folder
from ppctl.runs.checkpoint_folder import MANIFEST

FORMAT = 2

CHUNK = 16 * 2**20
"""Bytes of a shard under one digest; the last chunk may be shorter. A multiple of every dtype's size."""

DIGEST = "xxh3-128"

Digest = Annotated[str, re.compile(r"[0-9a-f]{32,64}")]
FileName = Annotated[str, re.compile(r"(?!\.\.?$)[A-Za-z0-9._-]{1,255}")]
"""The name of a file in the checkpoint's own directory."""

Chunk = tuple[int, int, str]
"""(begin, end, digest): bytes begin to end of a file."""

_MOST_OF_A_MANIFEST = 2**30
_MOST_ENTRIES = {"": 64, "files": 2**17, "tensors": 2**20}
"""The most entries of a manifest: at its top level (`""`), in `files`, and in `tensors`."""
_MOST_DIMS, _MOST_ELEMENTS = 32, 2**60

_LISTED = 8
"""The most tensors that a message names if a manifest does not describe them whole."""

_BEGIN, _SEAL = b'{\n "format": 2,\n', b',\n "seal": "'


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size, and the digest of its first `header` bytes, which no tensor's chunks cover."""

    bytes: Count
    header: Annotated[int, range(MOST_READ_OF_A_MODEL)]
    digest: Digest


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Where one part of a tensor is: `bytes` (begin, end) of `file`, without the end, little-endian and row-major."""

    file: FileName
    bytes: tuple[Count, Count]
    offset: tuple[Count, ...]
    shape: tuple[Count, ...]
    digests: tuple[Digest, ...]
    """The digest of each chunk."""

    @property
    def box(self) -> Box:
        """The box of the tensor that this part has."""
        return Box(self.offset, self.shape)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the chunks of this part in the order of its file."""
        begin, end = self.bytes
        for number, digest in enumerate(self.digests):
            first = begin + number * CHUNK
            yield first, min(first + CHUNK, end), digest


_SHARD = tuple(each.name for each in fields(ShardRecord))


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The whole tensor's shape, its dtype by torch's name, and the parts that make it up."""

    shape: tuple[Count, ...]
    dtype: Annotated[str, frozenset(DTYPES)]
    shards: tuple[ShardRecord, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files (but the manifest itself) and all tensors of one checkpoint."""

    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    def to_text(self) -> str:
        """Return the manifest as JSON, a line for each file and tensor. Its last entry is the SHA-256 of the others."""
        head = {"format": FORMAT, "step": self.step, "digest": DIGEST, "chunk": CHUNK}
        files = {name: asdict(record) for name, record in self.files.items()}
        tensors = {
            name: {"shape": record.shape, "dtype": record.dtype, "shards": [_plain(shard) for shard in record.shards]}
            for name, record in self.tensors.items()
        }
        entries = [f"{_json(key)}: {_json(value)}" for key, value in head.items()]
        entries += [f'"{key}": {{{_lines(section)}}}' for key, section in (("files", files), ("tensors", tensors))]
        body = "{\n " + ",\n ".join(entries)
        return f'{body}{_SEAL.decode()}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'

    @staticmethod
    def from_text(text: bytes) -> Manifest:
        """Return the manifest that `text` describes. Raises OtherFormat if it is another version's, else ValueError."""
        if not text.startswith(_BEGIN):
            raise OtherFormat(_named_format(text))
        with without_collections():
            return _sealed(text)


class OtherFormat(Exception):
    """A manifest of another version of ppctl."""


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _lines(records: Mapping[str, object]) -> str:
    lines = ",\n  ".join(f"{_json(name)}: {_json(record)}" for name, record in sorted(records.items()))
    return f"\n  {lines}\n " if lines else ""


def _plain(shard: ShardRecord) -> dict[str, object]:
    """Return the fields. `asdict` copies every number by itself: a minute for a million shards."""
    return {each: getattr(shard, each) for each in _SHARD}


def _sealed(text: bytes) -> Manifest:
    """Read a text line by line, as it was written: too many entries are refused before all are in memory. Raises
    OtherFormat and ValueError."""
    body, _, rest = text.rpartition(_SEAL)
    if hashlib.sha256(body).hexdigest().encode() != rest[:64]:
        raise ValueError("its seal (the SHA-256 at its end) does not match its content")
    sections: dict[str, dict[str, Any]] = {"": {}}
    kinds: dict[str, Any] = {"": Any, "files": dict[FileName, FileRecord], "tensors": dict[Line, TensorRecord]}
    section, lines = "", BytesIO(body)
    next(lines)
    for line in lines:
        entry = line.strip().rstrip(b",")
        if len(entry) > MOST_READ:
            raise ValueError(f"it has a line of {len(entry)} bytes")
        if section and entry == b"}":
            section = ""
        elif not section and (begun := _SECTIONS.get(entry, "")) and begun not in sections:
            section, sections[begun] = begun, {}
        else:
            added = read(kinds[section], parse(b"{%b}" % entry))
            if not added or added.keys() & sections[section].keys():
                raise ValueError("it has a line that is no entry, or repeats an entry")
            if len(sections[section]) == _MOST_ENTRIES[section]:
                raise ValueError(f"it has more than {_MOST_ENTRIES[section]} {section or 'entries'}")
            sections[section] |= added
    head = read(_Head, sections[""])
    for section in kinds.keys() - sections.keys():  # an empty section is one line
        sections[section] = read(kinds[section], sections[""].get(section))
    if (head["digest"], head["chunk"]) != (DIGEST, CHUNK):
        raise OtherFormat(f"{FORMAT} with {head['digest']} of every {head['chunk']} bytes")
    return Manifest(head["step"], sections["files"], sections["tensors"])


class _Head(TypedDict):
    step: Count
    digest: Line
    chunk: Count


_SECTIONS = {b'"files": {': "files", b'"tensors": {': "tensors"}


def _named_format(text: bytes) -> int:
    """Return the number of the format that a manifest of any version names. Raises ValueError if it names none."""
    if len(text) > MOST_READ:
        raise ValueError(f"it has {len(text)} bytes")
    version: int = read(Count, read(dict[str, Any], parse(text)).get("format"))
    return version


def digests_of(data: memoryview) -> tuple[str, ...]:
    """Return the digest of each chunk of a shard's bytes; an empty shard has none."""
    return tuple(xxh3_128(data[begin : begin + CHUNK]).hexdigest() for begin in range(0, len(data), CHUNK))


def record_whole(data: bytes) -> FileRecord:
    """Return the record of a file without tensors, all of whose bytes are under its digest."""
    return FileRecord(len(data), len(data), xxh3_128(data).hexdigest())


def read_text(path: Path) -> bytes:
    """Return the manifest's bytes. Raises CheckpointError (PP-E501: missing, PP-E503: no regular file), OSError."""
    try:
        return read_whole(path / MANIFEST, _MOST_OF_A_MANIFEST, follow=False)
    except (FileNotFoundError, NotADirectoryError):
        message = f"there is no checkpoint at {path}" if not path.exists() else f"{path} is not a checkpoint"
        place = f"{path / MANIFEST} is missing"
        raise CheckpointError(Problem("PP-E501", message, _another(path), place)) from None
    except OSError as error:
        if error.errno not in ODD:
            raise
        raise CheckpointError(damaged(path, f"{MANIFEST}: {error.strerror}")) from None


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint. Raises CheckpointError if it is missing, damaged or of another format."""
    return checked_manifest(path, read_text(path))


def checked_manifest(path: Path, text: bytes) -> Manifest:
    """Return the manifest of a text that was read from the checkpoint at `path`. Raises as `read_manifest`."""
    try:
        manifest = Manifest.from_text(text)
    except OtherFormat as other:
        message = f"the checkpoint at {path} has format {other}, but this ppctl reads format {FORMAT}"
        raise CheckpointError(Problem("PP-E509", message, remedy="use the version of ppctl that wrote it")) from None
    except ValueError as error:
        raise CheckpointError(damaged(path, f"{MANIFEST} cannot be read ({error})")) from None
    if untold := list(islice(_untold(manifest), _LISTED)):
        raise CheckpointError([damaged(path, f"{MANIFEST}: {name}: {fault}") for name, fault in untold])
    return manifest


def in_file_order(manifest: Manifest) -> Iterator[tuple[str, ShardRecord]]:
    """Yield (tensor's name, shard) of all shards, file by file, in the order of their bytes in the file."""
    shards = [(name, shard) for name, record in manifest.tensors.items() for shard in record.shards]
    yield from sorted(shards, key=lambda each: (each[1].file, each[1].bytes))


def _untold(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield (name, why) of the tensors that the manifest does not describe whole: they could not be read."""
    for name, record in manifest.tensors.items():
        if len(record.shape) > _MOST_DIMS or prod(extent or 1 for extent in record.shape) >= _MOST_ELEMENTS:
            yield name, "there is no tensor of this shape"
        elif fault := tiling_fault(record.shape, (shard.box for shard in record.shards)):
            yield name, fault
        for shard in record.shards:
            if fault := _shard_fault(shard, DTYPES[record.dtype][1], manifest.files.get(shard.file)):
                yield name, fault
    for file, shards in groupby(in_file_order(manifest), key=lambda each: each[1].file):
        end = 0
        for name, shard in shards:
            if shard.bytes[0] < end:
                yield name, f"bytes {shard.bytes[0]} to {end} of {file} are another tensor's, too"
            end = shard.bytes[1]


def _shard_fault(shard: ShardRecord, width: int, file: FileRecord | None) -> str:
    begin, end = shard.bytes
    if file is None:
        return f"{shard.file} is not among its files"
    if end - begin != width * prod(shard.shape) or len(shard.digests) != -(-(end - begin) // CHUNK):
        return f"bytes {begin} to {end} of {shard.file} are not as many as its part has"
    return "" if file.header <= begin <= end <= file.bytes else f"bytes {begin} to {end} are not in {shard.file}"


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare size and header of some files with their records. Raises CheckpointError naming files that differ."""
    problems = [problem for name in names if (problem := _fault(path, name, manifest))]
    if problems:
        raise CheckpointError(problems)


def _fault(path: Path, name: str, manifest: Manifest) -> Problem | None:
    """Return what is wrong with a file: it is missing, or has another size or header; None if nothing is wrong. Raises
    OSError if the file system fails."""
    expected = manifest.files.get(name)
    if expected is None:
        return damaged(path, f"{name} is not in its {MANIFEST}")
    try:
        with open_regular(path / name, follow=False) as stream:
            size = os.fstat(stream.fileno()).st_size
            header = stream.read(min(expected.header, size))
    except (FileNotFoundError, NotADirectoryError):
        return damaged(path, f"{name} is missing")
    except OSError as error:
        if error.errno not in ODD:
            raise
        return damaged(path, f"{name}: {error.strerror}")
    if size != expected.bytes:
        return damaged(path, f"{name} has {size} bytes instead of {expected.bytes}")
    what = "" if expected.header == expected.bytes else f": bytes 0 to {expected.header}, its header"
    same = xxh3_128(header).hexdigest() == expected.digest
    return None if same else damaged(path, f"{name} has changed since it was written{what} (their {DIGEST} differs)")


def changed(file: str, begin: int, end: int, tensor: str) -> str:
    """Return the text for a chunk whose digest differs."""
    return f"{file} has changed since it was written: bytes {begin} to {end}, of {tensor} (their {DIGEST} differs)"


def damaged(path: Path, fault: str, place: str = "") -> Problem:
    """Return the problem of a checkpoint that is not what was written."""
    return Problem("PP-E503", f"the checkpoint at {path} is damaged: {fault}", _another(path), place)


def _another(path: Path) -> str:
    """Return a remedy: to go on from the newest usable checkpoint beside the unreadable one at `path`."""
    others = [other for other in checkpoint_folder.usable(path.parent) if other != path]
    if not others:
        return f"ls {pasted(str(path.parent))}"
    return pasted("ppctl", "resume", path.parent.parent, f"checkpoint.resume={others[-1]}")
