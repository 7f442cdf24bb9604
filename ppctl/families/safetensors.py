"""The headers of safetensors files: which tensors a directory has, and whether their bytes are there.

Only headers are read, which takes milliseconds for any size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.errors import CheckpointError, Problem, listed, pasted
from ppctl.host.files import MOST_READ_OF_A_MODEL, nearest_there, open_regular, read_whole

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

_BITS = {
    64: ("F64", "I64", "U64", "C64"),
    32: ("F32", "I32", "U32"),
    16: ("BF16", "F16", "I16", "U16"),
    8: ("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    6: ("F6_E2M3", "F6_E3M2"),
    4: ("F4",),
}
"""Bits of one value -> the format's dtypes of this size."""
_SIZES = {dtype: bits for bits, dtypes in _BITS.items() for dtype in dtypes}
_MOST_BYTES_OF_A_HEADER = 100_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a header describes it."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """The offset of the tensor's bytes in the file."""
    bytes: int


def read_header(file: Path) -> dict[str, Stored]:
    """The tensors of one file. Raises CheckpointError (PP-E523) for a file that is missing, cut off or of another kind,
    or that the library would not open because tensors' sizes do not fit their bytes or leave gaps."""
    try:
        with open_regular(file) as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = file.stat().st_size
            if length > size - 8:
                raise _damaged(file, f"has {size} bytes, which end within its header")
            if length > _MOST_BYTES_OF_A_HEADER:
                raise _damaged(
                    file, f"has no header of safetensors: such a header has at most {_MOST_BYTES_OF_A_HEADER:,} bytes"
                )
            header = json.loads(stream.read(length))
        texts = (header.pop("__metadata__", None) or {}).values()
        tensors = {name: _stored(file, entry, 8 + length) for name, entry in header.items()}
    except OSError as error:
        raise _damaged(file, f"cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise _damaged(file, f"has no header of safetensors ({type(error).__name__})") from None
    end = max((each.offset + each.bytes for each in tensors.values()), default=8 + length)
    if size != end:
        cut = [name for name, each in tensors.items() if each.offset + each.bytes > size]
        raise _damaged(file, f"has {size} bytes instead of {end}", listed(cut))
    if wrong := list(_misfits(tensors, 8 + length)):
        raise _damaged(file, "has a header that contradicts itself", listed(wrong))
    if not all(isinstance(text, str) for text in texts):
        raise _damaged(file, "has a header whose __metadata__ holds other things than text")
    return tensors


def _stored(file: Path, entry: Mapping[str, Any], start: int) -> Stored:
    """Read a header's entry of a tensor; the file's values begin at `start`. Raises ValueError for invalid numbers."""
    shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
    if not all(type(each) is int and each >= 0 for each in (*shape, first, last)):
        raise ValueError(entry)
    return Stored(file, str(entry["dtype"]), shape, start + first, last - first)


def _misfits(tensors: Mapping[str, Stored], start: int) -> Iterator[str]:
    """Yield a line per tensor whose bytes do not fit its shape and dtype, or leave a gap or overlap before them."""
    for name, each in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].bytes)):
        bits, type_ = math.prod(each.shape) * _SIZES.get(each.dtype, 0), f"{each.dtype}{list(each.shape)}"
        if each.dtype not in _SIZES:
            yield f"{name}: {each.dtype} is no dtype of safetensors"
        elif bits != 8 * each.bytes:
            yield f"{name}: {type_} has {-(-bits // 8)} bytes, but data_offsets has {each.bytes}"
        if each.offset != start:
            yield f"{name}: begins at byte {each.offset} of the file, but what lies before it ends at {start}"
        start = each.offset + each.bytes


def read_directory(directory: Path) -> dict[str, Stored]:
    """All tensors of a directory by name, from its index or its only file. Raises CheckpointError (PP-E523) naming
    every damaged file, and every tensor that the index places in a file that lacks it, or outside of the directory."""
    index = directory / INDEX
    if not index.exists():
        return read_header(directory / SINGLE)
    try:
        written = json.loads(read_whole(index, MOST_READ_OF_A_MODEL))["weight_map"]
        places = {str(name): str(file) for name, file in written.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _damaged(index, f"cannot be read ({type(error).__name__})") from None
    outside = [
        f"{name}: {file}" for name, file in places.items() if Path(file).is_absolute() or ".." in Path(file).parts
    ]
    if outside:
        raise _damaged(index, "names files outside of its directory", listed(outside))
    headers: dict[str, dict[str, Stored]] = {}
    problems: list[Problem] = []
    for file in sorted(set(places.values())):
        try:
            headers[file] = read_header(directory / file)
        except CheckpointError as error:
            problems += error.problems
    for file, header in headers.items():
        if lost := [name for name, place in places.items() if place == file and name not in header]:
            problems += _damaged(directory / file, f"lacks tensors that {INDEX} places there", listed(lost)).problems
    if problems:
        raise CheckpointError(problems)
    return {name: headers[file][name] for name, file in places.items()}


def _damaged(file: Path, fault: str, place: str = "") -> CheckpointError:
    return CheckpointError(Problem("PP-E523", f"{file} {fault}", f"ls -l {pasted(nearest_there(file.parent))}", place))
