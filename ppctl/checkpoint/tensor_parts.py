"""Parts of tensors without their values: their names, where they lie in memory, which ranks hold and write each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple
from zlib import compress, decompressobj, error

from ppctl.checkpoint.boxes import Box, tiling_fault
from ppctl.errors import CheckpointError, Problem
from ppctl.records import wire

DTYPES = {
    "float64": ("F64", 8),
    "int64": ("I64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
}
"""torch's name -> safetensors' name, bytes of an element."""

Values = Callable[[int], memoryview]
"""A function that returns the bytes of a rank's part by the part's number."""


class TensorPart(NamedTuple):
    """A box of a tensor, by the tensor's name, its whole shape, and its dtype by torch's name."""

    name: str
    whole: tuple[int, ...]
    dtype: str
    box: Box

    @property
    def bytes(self) -> int:
        """The number of bytes of the part's values. Raises KeyError for a dtype that the format lacks."""
        return DTYPES[self.dtype][1] * prod(self.box.shape)

    @property
    def key(self) -> str:
        """The part's name in a file: the tensor's name and, unless the part is all of it, its offset: `NAME@0,512`."""
        if self.box == Box.whole(self.whole):
            return self.name
        return f"{self.name}@{','.join(map(str, self.box.offset))}"


# Names, for people


def text_of(shape: tuple[int, ...], dtype: str) -> str:
    """Return the text of a shape and a dtype, such as `float32[4, 8]`."""
    return f"{dtype}[{', '.join(map(str, shape))}]"


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
_DIGITS = re.compile(r"(\d+)")


def in_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers within names by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in _DIGITS.split(name)]


def ranges(names: Iterable[str]) -> list[str]:
    """Return names, one line for all that differ only in their first number:
    `model.layers.{4-7,9}.attention.wq.weight`."""
    groups: dict[tuple[str, str], list[int]] = {}
    plain: list[str] = []
    for name in names:
        match = _NUMBER.search(name)
        if match is None:
            plain.append(name)
        else:
            groups.setdefault((name[: match.start()], name[match.end() :]), []).append(int(match[0]))
    return sorted(plain) + [f"{head}{_braced(set(numbers))}{tail}" for (head, tail), numbers in sorted(groups.items())]


def _braced(numbers: set[int]) -> str:
    return f"{{{','.join(spans(numbers))}}}" if len(numbers) > 1 else str(*numbers)


def spans(numbers: Iterable[int]) -> list[str]:
    """Return the numbers as ranges, in order: `4-7`, `9`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]


# Where the values of a rank's parts lie in memory that its writer reads, too


_ALIGNED = 64


def places(parts: Sequence[TensorPart]) -> list[tuple[int, int]]:
    """Return where the bytes of each part lie in the memory of its rank: [begin, end)."""
    ranges, end = [], 0
    for part in parts:
        begin = -(-end // _ALIGNED) * _ALIGNED
        end = begin + part.bytes
        ranges.append((begin, end))
    return ranges


def size_of(parts: Sequence[TensorPart]) -> int:
    """Return the number of bytes of a rank's memory for these parts; never 0."""
    where = places(parts)
    return max(where[-1][1] if where else 0, 1)


def values_in(memory: memoryview, parts: Sequence[TensorPart]) -> Values:
    """Return the values of parts that lie in `memory`."""
    where = places(parts)
    return lambda number: memory[slice(*where[number])]


# Which rank writes which part


class Writers(NamedTuple):
    """The rank that writes, and the ranks that hold, each part."""

    own: tuple[bytes, ...]
    """For each rank: for each of its parts, in order, 1 if it writes it."""
    holders: dict[TensorPart, list[tuple[int, int]]]
    """For each part: (rank, number of the part on that rank) of all ranks that hold it, the writer first."""


class _PartColumns(NamedTuple):
    """Parts as bytes encode them: three lists instead of a record for each part; what parts share is there once."""

    names: list[str]
    kinds: list[tuple[tuple[int, ...], str, Box]]
    """Whole shapes, dtypes and boxes."""
    kind_of: list[int]
    """For each part the number of its kind in `kinds`."""


_MOST = 2**28
"""The most bytes of one rank's list of parts: 256 MiB, about two million parts."""


def packed_parts(parts: Sequence[TensorPart]) -> bytes:
    """Return parts as bytes: less than a MiB for a hundred thousand."""
    kinds: dict[tuple[Any, ...], int] = {}
    kind_of = [kinds.setdefault(part[1:], len(kinds)) for part in parts]
    return compress(wire.packed(_PartColumns, _PartColumns([part.name for part in parts], list(kinds), kind_of)), 1)


def parts_of(data: bytes) -> list[TensorPart]:
    """Return the parts from bytes of `packed_parts`. Raises Malformed."""
    try:
        columns: _PartColumns = wire.unpacked(_PartColumns, decompressobj().decompress(data, _MOST))
        return [TensorPart(name, *columns.kinds[n]) for name, n in zip(columns.names, columns.kind_of, strict=True)]
    except (error, ValueError, IndexError) as fault:
        raise wire.Malformed(f"no list of parts: {fault}") from None


def choose_writers(held: Sequence[Sequence[TensorPart]]) -> Writers:
    """Choose the rank that writes each part: the least loaded of its holders, which then comes first of these. `held`
    are all ranks' parts, in rank order. The largest parts are given away first; equal ones in the order of their names,
    to the lowest of equal ranks, so that the same parts always give the same writers. Raises
    CheckpointError if parts of a tensor overlap or leave something out.
    """
    holders: dict[TensorPart, list[tuple[int, int]]] = {}
    for rank, parts in enumerate(held):
        for number, part in enumerate(parts):
            holders.setdefault(part, []).append((rank, number))
    check_tensors(holders)
    loads = [0] * len(held)
    own = [bytearray(len(parts)) for parts in held]
    for part in sorted(holders, key=lambda part: (-part.bytes, part)):
        chosen = min(holders[part], key=lambda holder: (loads[holder[0]], holder))
        loads[chosen[0]] += part.bytes
        own[chosen[0]][chosen[1]] = 1
        holders[part] = [chosen, *(holder for holder in holders[part] if holder != chosen)]
    return Writers(tuple(map(bytes, own)), holders)


def check_tensors(parts: Iterable[TensorPart]) -> None:
    """Raise CheckpointError (PP-E506) unless different parts cover each element of every tensor exactly once."""
    tensors: dict[str, list[TensorPart]] = {}
    for part in parts:
        tensors.setdefault(part.name, []).append(part)
    faults = []
    for name, its_parts in tensors.items():
        kinds = {(part.whole, part.dtype) for part in its_parts}
        if len(kinds) > 1:
            faults.append(f"{name}: ranks hold it as {' and '.join(text_of(*kind) for kind in sorted(kinds))}")
        elif fault := tiling_fault(its_parts[0].whole, {part.box for part in its_parts}):
            faults.append(f"{name}: {fault}")
    if faults:
        message = "the ranks' parts do not make up whole tensors"
        remedy = "please report this: ppctl divided its tensors wrongly"
        raise CheckpointError(Problem("PP-E506", message, remedy, place="\n".join(faults)))


def check_copies(writers: Writers, digests: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError (PP-E504) naming all tensors whose copies differ. `digests` has, for each rank, the digests
    of its parts in order."""
    unequal: dict[tuple[int, ...], set[str]] = {}
    for part, holders in writers.holders.items():
        if len({digests[rank][number] for rank, number in holders}) > 1:
            unequal.setdefault(tuple(sorted({rank for rank, _ in holders})), set()).add(part.name)
    if unequal:
        raise CheckpointError([_unequal(names, ranks) for ranks, names in sorted(unequal.items())])


def _unequal(names: set[str], ranks: tuple[int, ...]) -> Problem:
    where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
    return Problem(
        "PP-E504",
        f"not saved: copies that must be bit-equal differ on {where}; a checkpoint would silently keep one",
        remedy="`ppctl resume` continues from the last checkpoint, where they were equal",
        place="\n".join(ranges(names)),
    )
