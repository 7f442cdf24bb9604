"""Which ranks hold the parts of a checkpoint's tensors, which of them writes each, and the proof that copies are equal.

Must not know why several ranks hold one (data-parallel replicas, tied uses on two pipeline ranks, what tensor
parallelism cannot split), nor files, nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple
from zlib import compress, decompressobj, error

from ppctl import wire
from ppctl.checkpoint.boxes import Box, tiling_fault
from ppctl.checkpoint.names import ranges
from ppctl.checkpoint.shard_file import Part, text_of
from ppctl.errors import CheckpointError, Problem


class Writers(NamedTuple):
    """Who writes what."""

    own: tuple[bytes, ...]
    """For each rank: for each of its shards, in order, 1 where it writes it."""
    holders: dict[Part, list[tuple[int, int]]]
    """For each part: (rank, number of its shard) of all that hold it, the writer first."""


class _Columns(NamedTuple):
    """Parts as they travel: a few lists in place of a record for each, and of what many have alike one."""

    names: list[str]
    kinds: list[tuple[tuple[int, ...], str, Box]]
    """Whole shapes, dtypes and boxes."""
    of: list[int]
    """For each part the number of its kind."""


_MOST = 2**28
"""Bytes of one rank's parts: 256 MiB, about two million of them."""


def packed_parts(parts: Sequence[Part]) -> bytes:
    """Parts as bytes: of a hundred thousand, less than a MiB."""
    kinds: dict[tuple[Any, ...], int] = {}
    of = [kinds.setdefault(part[1:], len(kinds)) for part in parts]
    return compress(wire.packed(_Columns, _Columns([part.name for part in parts], list(kinds), of)), 1)


def parts_of(data: bytes) -> list[Part]:
    """The parts that `packed_parts` made these bytes of. Raises Malformed."""
    try:
        columns: _Columns = wire.unpacked(_Columns, decompressobj().decompress(data, _MOST))
        return [Part(name, *columns.kinds[kind]) for name, kind in zip(columns.names, columns.of, strict=True)]
    except (error, ValueError, IndexError) as fault:
        raise wire.Malformed(f"no list of parts: {fault}") from None


def choose_writers(held: Sequence[Sequence[Part]]) -> Writers:
    """The rank that writes each part, over all ranks' parts in rank order: of those that hold it, the least loaded.

    The largest parts are given away first; equal ones in the order of their names, to the lowest of equal ranks, so
    that the same parts always give the same writers. Raises CheckpointError where parts of one tensor do not fit
    together, or are not all of it.
    """
    holders: dict[Part, list[tuple[int, int]]] = {}
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


def check_tensors(parts: Iterable[Part]) -> None:
    """Raise CheckpointError (PP-E506) unless different parts make up every tensor, each element once."""
    tensors: dict[str, list[Part]] = {}
    for part in parts:
        tensors.setdefault(part.name, []).append(part)
    faults = []
    for name, found in tensors.items():
        kinds = {(part.whole, part.dtype) for part in found}
        if len(kinds) > 1:
            faults.append(f"{name}: ranks hold it as {' and '.join(text_of(*kind) for kind in sorted(kinds))}")
        elif fault := tiling_fault(found[0].whole, {part.box for part in found}):
            faults.append(f"{name}: {fault}")
    if faults:
        message = "the ranks' parts do not make up whole tensors"
        remedy = "please report this: ppctl divided its tensors wrongly"
        raise CheckpointError(Problem("PP-E506", message, remedy, place="\n".join(faults)))


def check_copies(writers: Writers, digests: Sequence[Sequence[str]]) -> None:
    """Raise CheckpointError (PP-E504), which names all tensors whose copies differ.

    `digests` are those of all shards of all ranks, in their order.
    """
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
