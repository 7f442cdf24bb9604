"""How context parallelism divides a sequence over its ranks, and which keys the queries of each rank see.

A sequence is cut into 2n equal chunks; of n ranks, rank r has the chunks r and 2n-1-r, one after the other: its two
halves. So causal attention costs every rank the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple, TypeVar

T = TypeVar("T")

Lengths = tuple[tuple[int, ...], ...]
"""For each row the lengths of its documents, in order; they add up to the row."""


class VisibleBlock(NamedTuple):
    """Queries that see keys; all slices count within the tensors at hand."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    """Whether queries and keys are the same tokens, and each query sees keys up to itself; else each sees every key."""


@dataclass(frozen=True, slots=True)
class Halves:
    """The part of a sequence that one rank has."""

    rank: int
    ranks: int
    length: int
    """Tokens of the whole sequence, a multiple of 2 x ranks."""

    @property
    def chunk(self) -> int:
        """Tokens of one half."""
        return self.length // (2 * self.ranks)

    @property
    def positions(self) -> tuple[range, range]:
        """Positions of the rank's tokens in the whole sequence."""
        first, second = self.rank * self.chunk, (2 * self.ranks - 1 - self.rank) * self.chunk
        return range(first, first + self.chunk), range(second, second + self.chunk)


def chunk_owners(ranks: int) -> list[tuple[int, int]]:
    """(rank, which half) that has each chunk, in the sequence's order."""
    return [*((rank, 0) for rank in range(ranks)), *((rank, 1) for rank in reversed(range(ranks)))]


def own_lengths(lengths: Lengths, own: Halves, *, apart: bool = False) -> Lengths:
    """The lengths of the documents among a rank's tokens. A document with tokens in both halves, which are neighbours
    on this rank, counts as one, unless the halves are taken `apart`."""
    return tuple(tuple(_own_row(row, own, apart)) for row in lengths)


def _own_row(row: Sequence[int], own: Halves, apart: bool) -> list[int]:
    documents = _documents(row)
    parts = [[_overlap(document, half) for document in documents] for half in own.positions]
    counts = [*parts[0], *parts[1]] if apart else [sum(both) for both in zip(*parts, strict=True)]
    return [count for count in counts if count]


@lru_cache(64)
def own_blocks(lengths: Lengths) -> tuple[VisibleBlock, ...]:
    """A causal block for every document of `lengths`; neighbouring rows with equal documents share blocks."""
    blocks = []
    for first, last, row in _runs(lengths):
        for document in _documents(row):
            tokens = slice(document.start, document.stop)
            blocks.append(VisibleBlock(slice(first, last), tokens, tokens, causal=True))
    return tuple(blocks)


@lru_cache(1024)
def ring_blocks(lengths: Lengths, own: Halves, source: int) -> tuple[VisibleBlock, ...]:
    """Blocks in which a rank's queries see the keys of another rank: one or none for each row.

    Keys are of earlier chunks than the queries, so only the document that spans the end of the last visible chunk
    counts: its queries are the first ones, its keys the last visible ones. An earlier rank's first half is visible to
    all queries, a later rank's two halves to the second half of the queries.
    """
    later, theirs = source > own.rank, Halves(source, own.ranks, own.length).positions
    queries, keys = own.positions[later:], theirs[: 1 + later]
    begin, end = own.chunk * later, own.chunk * (1 + later)

    def of_row(row: Sequence[int]) -> list[tuple[int, int, int, int]]:
        document = _document_at(row, keys[-1].stop - 1)
        asking = sum(_overlap(document, half) for half in queries)
        asked = sum(_overlap(document, half) for half in keys)
        return [(begin, begin + asking, end - asked, end)] if asking else []

    return tuple(_blocks(map(of_row, lengths)))


@lru_cache(64)
def gathered_blocks(lengths: Lengths, own: Halves) -> tuple[VisibleBlock, ...]:
    """Blocks in which a rank's queries see the whole sequence before their half: for each row and half at most one
    block, of the document that spans the half's start. Keys count within the whole sequence."""

    def of_row(row: Sequence[int]) -> list[tuple[int, int, int, int]]:
        visible = []
        for number, half in enumerate(own.positions):
            document = _document_at(row, half.start - 1) if half.start else range(0)
            asking = _overlap(document, half)
            if asking:
                visible.append((number * own.chunk, number * own.chunk + asking, document.start, half.start))
        return visible

    return tuple(_blocks(map(of_row, lengths)))


def _blocks(rows: Iterable[list[tuple[int, int, int, int]]]) -> Iterator[VisibleBlock]:
    for first, last, visible in _runs(list(rows)):
        for begin, end, keys_begin, keys_end in visible:
            yield VisibleBlock(slice(first, last), slice(begin, end), slice(keys_begin, keys_end))


def _runs(rows: Sequence[T]) -> Iterator[tuple[int, int, T]]:
    """(first, after the last, the row) of each run of equal rows, which share one block."""
    first = 0
    for same, run in groupby(rows):
        last = first + len(list(run))
        yield first, last, same
        first = last


def _documents(row: Sequence[int]) -> list[range]:
    return [range(end - count, end) for count, end in zip(row, accumulate(row), strict=True)]


def _document_at(row: Sequence[int], position: int) -> range:
    return next(document for document in _documents(row) if position in document)


def _overlap(left: range, right: range) -> int:
    return max(0, min(left.stop, right.stop) - max(left.start, right.start))
