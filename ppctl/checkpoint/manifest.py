"""The manifest: which bytes of which file are which part of which tensor, and the digests that prove it.

Knows the files of one checkpoint directory, in the format of `docs/checkpoint.md` and, for reading, in format 1 before
it. Must not know ranks, models or torch: a checkpoint can be verified where torch is not installed.
"""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

from xxhash import xxh3_128

from ppctl import checkpoint_folder
from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint_folder import MANIFEST, STATE
from ppctl.errors import CheckpointError, Problem, listed, pasted
from ppctl.files import check_regular

FORMAT = 2
OLDEST = 1
"""torch's distributed checkpoint with a SHA-256 of each file and tensor, written until 2026-11."""

CHUNK = 16 * 2**20
"""Bytes of a shard under one digest; the last chunk of a shard is shorter. Divides by the size of every dtype."""

DIGEST = "xxh3-128"

Chunk = tuple[int, int, str]
"""(begin, end, digest): bytes begin to end of a file."""

_LISTED = 8
"""Tensors that are named of a file that is missing or too short."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DIGITS = re.compile(r"(\d+)")
_SEAL = b',\n "seal": "'


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file: its size, and the digest of its first `header` bytes, which no tensor's chunks cover."""

    bytes: int
    header: int
    digest: str


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """Where one part of a tensor is: `bytes` [begin, end] of `file`, little-endian and row-major."""

    file: str
    bytes: tuple[int, int]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    digests: tuple[str, ...]
    """One of each chunk."""

    @property
    def box(self) -> Box:
        """Which elements of the tensor these are."""
        return Box(self.offset, self.shape)

    def chunks(self) -> Iterator[Chunk]:
        """The chunks, in the order of the file."""
        begin, end = self.bytes
        for number, digest in enumerate(self.digests):
            first = begin + number * CHUNK
            yield first, min(first + CHUNK, end), digest


_SHARD = tuple(each.name for each in fields(ShardRecord))


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The whole tensor's shape, its dtype by torch's name, and the parts that together are it."""

    shape: tuple[int, ...]
    dtype: str
    shards: tuple[ShardRecord, ...] = ()
    sha256: str = ""
    """Of all values; in format 1, which has no shards."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files (but the manifest itself) and all tensors of one checkpoint."""

    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]
    format: int = FORMAT

    def to_text(self) -> str:
        """The manifest as JSON, a line for each file and tensor. Its last entry is the SHA-256 of all before it."""
        head = {"format": FORMAT, "step": self.step, "digest": DIGEST, "chunk": CHUNK}
        files = {name: asdict(record) for name, record in self.files.items()}
        tensors = {
            name: {"shape": record.shape, "dtype": record.dtype, "shards": [_plain(shard) for shard in record.shards]}
            for name, record in self.tensors.items()
        }
        entries = [f"{_json(key)}: {_json(value)}" for key, value in head.items()]
        entries += [f'"{key}": {{{_lines(found)}}}' for key, found in (("files", files), ("tensors", tensors))]
        body = "{\n " + ",\n ".join(entries)
        return f'{body}{_SEAL.decode()}{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'

    @staticmethod
    def from_text(text: bytes) -> Manifest:
        """The inverse of `to_text`; also of format 1.

        Raises ValueError, KeyError, TypeError or AttributeError for what is none, `OtherFormat` for a later one.
        """
        with without_collections():
            return Manifest._from_text(text)

    @staticmethod
    def _from_text(text: bytes) -> Manifest:
        value = json.loads(text)
        version = value["format"]
        if version == 1:
            return _format_1(value)
        if version != FORMAT:
            raise OtherFormat(version)
        body, _, rest = text.rpartition(_SEAL)
        if hashlib.sha256(body).hexdigest().encode() != rest[:64]:
            raise ValueError("its seal (the SHA-256 at its end) does not match its content")
        if (value["digest"], value["chunk"]) != (DIGEST, CHUNK):
            raise OtherFormat(f"{version} with {value['digest']} of every {value['chunk']} bytes")
        files = {name: FileRecord(**record) for name, record in value["files"].items()}
        tensors = {
            name: TensorRecord(tuple(record["shape"]), record["dtype"], tuple(map(_shard, record["shards"])))
            for name, record in value["tensors"].items()
        }
        return Manifest(int(value["step"]), files, tensors)


@contextmanager
def without_collections() -> Iterator[None]:
    """Keeps Python from looking for garbage among records that all stay: with 2,048 ranks half of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


class OtherFormat(Exception):
    """A manifest of another version of ppctl."""


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _lines(found: Mapping[str, object]) -> str:
    lines = ",\n  ".join(f"{_json(name)}: {_json(record)}" for name, record in sorted(found.items()))
    return f"\n  {lines}\n " if lines else ""


def _plain(shard: ShardRecord) -> dict[str, object]:
    """As `asdict`, which copies every number by itself: of a million shards that would take a minute."""
    return {each: getattr(shard, each) for each in _SHARD}


def _shard(record: Mapping[str, Any]) -> ShardRecord:
    begin, end = record["bytes"]
    offset, shape = tuple(record["offset"]), tuple(record["shape"])
    return ShardRecord(record["file"], (begin, end), offset, shape, tuple(record["digests"]))


def _format_1(value: Mapping[str, Any]) -> Manifest:
    files = {name: FileRecord(each["bytes"], each["bytes"], each["sha256"]) for name, each in value["files"].items()}
    tensors = {
        name: TensorRecord(tuple(each["shape"]), each["dtype"], (), each["sha256"])
        for name, each in value["tensors"].items()
    }
    return Manifest(int(value["step"]), files, tensors, format=1)


def digests_of(data: memoryview) -> tuple[str, ...]:
    """The digest of each chunk of a shard's bytes; of an empty shard, none."""
    return tuple(xxh3_128(data[begin : begin + CHUNK]).hexdigest() for begin in range(0, len(data), CHUNK))


def record_whole(data: bytes) -> FileRecord:
    """The record of a file that holds no tensors."""
    return FileRecord(len(data), len(data), xxh3_128(data).hexdigest())


def read_text(path: Path) -> bytes:
    """The bytes of the manifest of the checkpoint at `path`; CheckpointError if there is none."""
    try:
        check_regular(path / MANIFEST)
        return (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        message = f"there is no checkpoint at {path}" if not path.exists() else f"{path} is not a checkpoint"
        place = f"{path / MANIFEST} is missing"
        raise CheckpointError(Problem("PP-E501", message, _another(path), place)) from None


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`; CheckpointError if it is missing, damaged or of a later format."""
    text = read_text(path)
    try:
        return Manifest.from_text(text)
    except OtherFormat as other:
        message = f"the checkpoint at {path} has format {other}, this ppctl reads formats {OLDEST} to {FORMAT}"
        raise CheckpointError(Problem("PP-E509", message, remedy="use the version of ppctl that wrote it")) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        fault = f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
        raise CheckpointError(damaged(path, fault)) from None


def state_text(state: Mapping[str, Any]) -> bytes:
    """The content of `state.json`."""
    return (json.dumps(dict(state), indent=1) + "\n").encode()


def read_state(path: Path) -> dict[str, Any]:
    """The `state` that was saved with the checkpoint at `path`, after checking its digest."""
    return checked_state(path, read_manifest(path))


def checked_state(path: Path, manifest: Manifest) -> dict[str, Any]:
    """The same where the manifest has been read."""
    check_files(path, manifest, [STATE])
    state: dict[str, Any] = json.loads((path / STATE).read_bytes())
    return state


def lineage(state: Mapping[str, Any]) -> Iterator[Path]:
    """Where the weights of a checkpoint's `state` began, and where those did: checkpoints, and at the end a directory.

    It ends where a checkpoint of the way is not there any more, or cannot be read.
    """
    seen: set[str] = set()
    while (named := state.get("source") or state.get("model", {}).get("from_")) and named not in seen:
        seen.add(named)
        yield Path(named)
        if not (Path(named) / STATE).is_file():
            return
        try:
            state = read_state(Path(named))
        except CheckpointError:
            return


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare size and header of some files with their records (in format 1 all of them): CheckpointError names those
    that differ, and tensors that are lost with them."""
    problems = [problem for name in names if (problem := _fault(path, name, manifest))]
    if problems:
        raise CheckpointError(problems)


def _fault(path: Path, name: str, manifest: Manifest) -> Problem | None:
    expected, file = manifest.files.get(name), path / name
    if expected is None:
        return damaged(path, f"{name} is not in its {MANIFEST}")
    if not file.is_file():
        return damaged(path, f"{name} is missing", _lost(manifest, name, 0))
    size = file.stat().st_size
    with open(file, "rb") as stream:
        if manifest.format == 1 and size == expected.bytes:
            same = hashlib.file_digest(stream, "sha256").hexdigest() == expected.digest
            return None if same else damaged(path, f"{name} has changed since it was written (its SHA-256 differs)")
        header = stream.read(expected.header)
        same = xxh3_128(header).hexdigest() == expected.digest
        if not same and (other := _written_as(manifest, header[:8], stream)):
            fault = f"{name} holds what was written as {other}: bytes 0 to {expected.header}, its header, are others"
            return damaged(path, fault, _lost(manifest, name, 0))
    if size != expected.bytes:
        return damaged(path, f"{name} has {size} bytes instead of {expected.bytes}", _lost(manifest, name, size))
    what = "" if expected.header == expected.bytes else f": bytes 0 to {expected.header}, its header"
    return None if same else damaged(path, f"{name} has changed since it was written{what} (their {DIGEST} differs)")


def _written_as(manifest: Manifest, begin: bytes, stream: BinaryIO) -> str:
    """The file of values that this one was, by its header; empty if it is none of this checkpoint."""
    length = 8 + int.from_bytes(begin, "little")
    same_length = {record.digest: name for name, record in manifest.files.items() if record.header == length}
    stream.seek(0)
    return same_length.get(xxh3_128(stream.read(length)).hexdigest(), "") if same_length else ""


def _lost(manifest: Manifest, file: str, size: int) -> str:
    """A line for each of the first tensors of which a file of `size` bytes has not everything."""
    lost = sorted(
        (shard.bytes, name)
        for name, record in manifest.tensors.items()
        for shard in record.shards
        if shard.file == file and shard.bytes[1] > max(size, shard.bytes[0])
    )
    lines = [f"{name}: bytes {begin} to {end}" for (begin, end), name in lost]
    return listed(lines, _LISTED)


def changed(file: str, begin: int, end: int, tensor: str) -> str:
    """The fault of a chunk whose digest differs."""
    return f"{file} has changed since it was written: bytes {begin} to {end}, of {tensor} (their {DIGEST} differs)"


def damaged(path: Path, fault: str, place: str = "") -> Problem:
    """The problem of a checkpoint that is not what was written."""
    return Problem("PP-E503", f"the checkpoint at {path} is damaged: {fault}", _another(path), place)


def _another(path: Path) -> str:
    """A command that goes on from the newest complete checkpoint beside the one at `path`, which cannot be read."""
    others = [other for other in checkpoint_folder.complete(path.parent) if other != path]
    if not others:
        return f"ls {pasted(str(path.parent))}"
    resume = pasted(f"checkpoint.resume={others[-1]}")
    return f"ppctl resume {pasted(str(path.parent.parent))} {pasted(resume)}"


def in_order(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers within names by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


def ranges(names: Iterable[str]) -> list[str]:
    """Names, one line for all that differ in their first number only: `model.layers.{4-7,9}.attention.wq.weight`."""
    groups: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for name in names:
        match = _NUMBER.search(name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((name[: match.start()], name[match.end() :]), []).append(int(match[0]))
    return sorted(plain) + [
        f"{head}{_spans(sorted(set(found)))}{tail}" for (head, tail), found in sorted(groups.items())
    ]


def _spans(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return "{" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "}"
