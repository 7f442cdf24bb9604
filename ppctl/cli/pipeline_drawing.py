"""A pipeline's drawing in `plan` and `layout`: a row per pp_rank (equal neighbours share one), a column per chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from ppctl.layout.letters import stage_text


class Chunk(NamedTuple):
    """One stage in the drawing."""

    pp_rank: int
    letters: str
    """The letters of the chunk's layers, such as `Ettt`."""
    first: int
    """The id of the chunk's first decoder layer; without meaning if the chunk has no decoder layer."""


class Row(NamedTuple):
    """Neighbouring pp_ranks that hold the same kinds of layers, and the text of each of their chunks."""

    ranks: list[int]
    cells: list[str]

    @property
    def span(self) -> str:
        """The ranks as `3` or `1-13`."""
        first, last = self.ranks[0], self.ranks[-1]
        return str(first) if first == last else f"{first}-{last}"


def rows_of(chunks: Iterable[Chunk], apart: Callable[[int], object] = lambda pp_rank: None) -> list[Row]:
    """The rows of `chunks`, which are in model order; ranks whose `apart(pp_rank)` differs never share one."""
    by_rank: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        by_rank.setdefault(chunk.pp_rank, []).append(chunk)
    alike = groupby(sorted(by_rank), key=lambda rank: ([chunk.letters for chunk in by_rank[rank]], apart(rank)))
    runs = [list(run) for _, run in alike]
    return [Row(run, [_cell(same) for same in zip(*(by_rank[rank] for rank in run), strict=True)]) for run in runs]


def with_header(rows: Sequence[Row]) -> list[list[str]]:
    """The cells of the table, with the names of its columns."""
    header = ["pp_rank", *(f"chunk {chunk}" for chunk in range(len(rows[0].cells)))]
    return [header, *([row.span, *row.cells] for row in rows)]


def _cell(chunks: Sequence[Chunk]) -> str:
    """The letters of chunks with equal letters, and the range of their decoder layers' ids."""
    letters = chunks[0].letters
    start = min(chunk.first for chunk in chunks)
    end = max(chunk.first for chunk in chunks) + letters.count("t") - 1
    ids = "" if "t" not in letters else f" [{start}]" if start == end else f" [{start}-{end}]"
    return (stage_text(letters) or "(empty)") + ids
