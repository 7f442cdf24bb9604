"""The headers of safetensors files: which tensors a directory has, and whether their bytes are there.

Knows the format (eight bytes of length, a JSON header, the tensors' bytes) and the index beside several files. Must not
know models or torch: nothing but headers is read, which takes milliseconds for any size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.errors import CheckpointError, Problem
from ppctl.files import MOST_READ_OF_A_MODEL, read_whole

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

SIZES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I64": 8, "I32": 4, "U8": 1, "BOOL": 1}
"""Bytes of one value of each dtype that is read."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises CheckpointError (PP-E523) for one that is missing, cut or of another kind."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if length > size - 8:
                raise _damaged(file, f"has {size} bytes, which end within its header")
            header = json.loads(stream.read(length))
        found = {name: _stored(file, entry) for name, entry in header.items() if name != "__metadata__"}
        end = 8 + length + max((entry["data_offsets"][1] for name, entry in header.items() if name in found), default=0)
    except OSError as error:
        raise _damaged(file, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(file, f"has no header of safetensors ({type(error).__name__})") from None
    if size != end:
        cut = [name for name, entry in header.items() if name in found and 8 + length + entry["data_offsets"][1] > size]
        raise _damaged(file, f"has {size} bytes instead of {end}", "\n".join(cut))
    return found


def _stored(file: Path, entry: Mapping[str, Any]) -> Stored:
    first, last = entry["data_offsets"]
    shape = tuple(int(extent) for extent in entry["shape"])
    return Stored(file, str(entry["dtype"]), shape, last - first)


def read_directory(directory: Path) -> dict[str, Stored]:
    """All tensors of a directory by name, from its index or its only file.

    Raises CheckpointError (PP-E523) naming every damaged file, and every tensor that the index places in a file that
    lacks it.
    """
    index = directory / INDEX
    if not index.exists():
        return read_header(directory / SINGLE)
    try:
        written = json.loads(read_whole(index, MOST_READ_OF_A_MODEL))["weight_map"]
        places = {str(name): str(file) for name, file in written.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(index, f"cannot be read ({type(error).__name__})") from None
    headers: dict[str, dict[str, Stored]] = {}
    problems: list[Problem] = []
    for file in sorted(set(places.values())):
        try:
            headers[file] = read_header(directory / file)
        except CheckpointError as error:
            problems += error.problems
    for file, header in headers.items():
        if lost := [name for name, place in places.items() if place == file and name not in header]:
            problems += _damaged(directory / file, f"lacks tensors that {INDEX} places there", "\n".join(lost)).problems
    if problems:
        raise CheckpointError(problems)
    return {name: headers[file][name] for name, file in places.items()}


def _damaged(file: Path, fault: str, place: str = "") -> CheckpointError:
    return CheckpointError(Problem("PP-E523", f"{file} {fault}", f"ls -l '{file.parent}'", place))
