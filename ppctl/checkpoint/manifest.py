"""The manifest: what a checkpoint must contain, byte for byte, and the proof that it does.

Knows the files of one checkpoint directory and their digests. Must not know ranks, models or how tensors are stored.
Standard library only: a checkpoint can be verified where torch is not installed.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ppctl import checkpoint_folder
from ppctl.checkpoint_folder import MANIFEST, STATE
from ppctl.errors import CheckpointError, Problem

FORMAT = 1

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Size and SHA-256 of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """Shape, dtype name and SHA-256 of the values of one tensor (little-endian, row-major)."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """All files (but the manifest itself) and all tensors of one checkpoint."""

    step: int
    files: Mapping[str, FileRecord]
    tensors: Mapping[str, TensorRecord]

    def to_text(self) -> str:
        """The manifest as JSON."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1, sort_keys=True) + "\n"

    @staticmethod
    def from_mapping(value: Mapping[str, Any]) -> Manifest:
        """The inverse of `to_text` after JSON; raises KeyError, TypeError or AttributeError for anything else."""
        files = {name: FileRecord(**record) for name, record in value["files"].items()}
        tensors = {
            name: TensorRecord(tuple(record["shape"]), record["dtype"], record["sha256"])
            for name, record in value["tensors"].items()
        }
        return Manifest(int(value["step"]), files, tensors)


def record_file(path: Path) -> FileRecord:
    """Size and digest of a file as it is now."""
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        return FileRecord(stream.tell(), digest)


def read_manifest(path: Path) -> Manifest:
    """The manifest of the checkpoint at `path`; CheckpointError if it is missing, damaged or in another format."""
    try:
        value = json.loads((path / MANIFEST).read_bytes())
        version = value["format"]
        if version == FORMAT:
            return Manifest.from_mapping(value)
    except (FileNotFoundError, NotADirectoryError):
        message = f"there is no checkpoint at {path}" if not path.exists() else f"{path} is not a checkpoint"
        place = f"{path / MANIFEST} is missing"
        raise CheckpointError(Problem("PP-E501", message, _another(path), place)) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(_damaged(path, f"{MANIFEST} cannot be read ({type(error).__name__}: {error})")) from None
    message = f"the checkpoint at {path} has format {version}, this ppctl reads format {FORMAT}"
    raise CheckpointError(Problem("PP-E509", message, remedy="use the version of ppctl that wrote it"))


def read_state(path: Path) -> dict[str, Any]:
    """The `state` that was saved with the checkpoint at `path`, after checking its digest."""
    check_files(path, read_manifest(path), [STATE])
    state: dict[str, Any] = json.loads((path / STATE).read_bytes())
    return state


def verify(path: Path) -> Manifest:
    """Read every byte of the checkpoint at `path`; CheckpointError names each file that is missing or damaged."""
    manifest = read_manifest(path)
    check_files(path, manifest, manifest.files)
    return manifest


def check_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Compare some of the checkpoint's files with their records; CheckpointError names all that differ."""
    problems = [_damaged(path, fault) for name in names if (fault := _fault(path / name, name, manifest))]
    if problems:
        raise CheckpointError(problems)


def _fault(file: Path, name: str, manifest: Manifest) -> str:
    expected = manifest.files.get(name)
    if expected is None:
        return f"{name} is not in its {MANIFEST}"
    if not file.is_file():
        return f"{name} is missing"
    size = file.stat().st_size
    if size != expected.bytes:
        return f"{name} has {size} bytes instead of {expected.bytes}"
    return "" if record_file(file) == expected else f"{name} has changed since it was written (its SHA-256 differs)"


def _damaged(path: Path, fault: str) -> Problem:
    return Problem("PP-E503", f"the checkpoint at {path} is damaged: {fault}", _another(path))


def _another(path: Path) -> str:
    """A command that goes on from the newest complete checkpoint beside the one at `path`, which cannot be read."""
    others = [other for other in checkpoint_folder.complete(path.parent) if other != path]
    if not others:
        return f"ls {shlex.quote(str(path.parent))}"
    resume = f"checkpoint.resume={others[-1]}"
    return f"ppctl resume {shlex.quote(str(path.parent.parent))} {shlex.quote(resume)}"


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
