"""Who holds what of a pipeline: a row per pp_rank, equal neighbours in one, and a column per chunk.

`plan` and `layout` draw the same. Knows letters of layers and where stages are placed. Must not know what a
stage costs, or whether a plan or a layout placed it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from ppctl.layout.letters import stage_text


class Chunk(NamedTuple):
    """One stage, as far as it is drawn."""

    pp_rank: int
    letters: str
    """Its layers, as `Ettt`."""
    first: int
    """The id of its first decoder layer; any number where it has none."""


class Row(NamedTuple):
    """Neighbouring pp_ranks that are alike, and for every chunk what they hold."""

    ranks: list[int]
    cells: list[str]


def header(vpp: int) -> list[str]:
    """The names of the columns."""
    return ["pp_rank", *(f"chunk {chunk}" for chunk in range(vpp))]


def table_rows(chunks: Iterable[Chunk], apart: Callable[[int], object] = lambda pp_rank: None) -> list[Row]:
    """The rows of `chunks`, which are in model order; neighbours are also kept apart where `apart(pp_rank)` differs."""
    held: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        held.setdefault(chunk.pp_rank, []).append(chunk)
    alike = groupby(sorted(held), key=lambda rank: ([chunk.letters for chunk in held[rank]], apart(rank)))
    runs = [list(run) for _, run in alike]
    return [Row(run, [_cell(same) for same in zip(*(held[rank] for rank in run), strict=True)]) for run in runs]


def span(ranks: Sequence[int]) -> str:
    """`3` or `1-13`."""
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _cell(chunks: Sequence[Chunk]) -> str:
    """What chunks with the same letters hold, with the ids of their decoder layers taken together."""
    letters = chunks[0].letters
    start = min(chunk.first for chunk in chunks)
    end = max(chunk.first for chunk in chunks) + letters.count("t") - 1
    ids = "" if "t" not in letters else f" [{start}]" if start == end else f" [{start}-{end}]"
    return (stage_text(letters) or "(empty)") + ids
