"""Reading a layout: a string through the grammar, a list by its names; every problem at once, with a remedy."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

from ppctl.errors import LayoutError, Problem
from ppctl.layout.letters import LETTERS, MAX_ITEMS, TYPES, LayerType, LayoutSource, canonical_text, lookalike
from ppctl.layout.parser import Mistake, Parsed, parse_text
from ppctl.layout.rules import mend

_MOST_SHOWN = 20
_CASES = ("e", "T", "M", "l")


_Nearest = Callable[[Sequence[str]], tuple[str, ...]]
"""Returns the nearest sound stages."""


def read_layout(
    layout: Any, key: str, pp: int | None = None, num_layers: int | None = None, mtp_num_layers: int | None = None
) -> tuple[tuple[str, ...], LayoutSource]:
    """The stages that a string or a list spells, and where they were written. Suggestions are sound for `pp` ranks
    (None: one chunk per rank) and a model of these layers. Raises LayoutError."""

    def nearest(stages: Sequence[str]) -> tuple[str, ...]:
        kept = tuple(stages) or ("",)
        fitting = mend(kept, pp or len(kept), num_layers, mtp_num_layers)
        return fitting or mend(kept, pp or 1) or mend(kept, 1) or ("EtL",)

    if isinstance(layout, str):
        parsed = parse_text(layout)
        source = LayoutSource(key, layout, parsed.columns)
        if parsed.mistakes:
            remedy = source.override(_suggestion(parsed, nearest))
            raise LayoutError(_problems(parsed.mistakes, remedy, source))
        return parsed.stages, source
    source = LayoutSource(key)
    problems: list[Problem] = []
    stages = _read_rows(layout, source, problems)
    if problems:
        remedy = source.override(canonical_text(nearest(stages)))
        raise LayoutError(Problem(p.code, p.message, remedy, p.place) for p in problems)
    return stages, source


def _problems(mistakes: Sequence[Mistake], remedy: str, source: LayoutSource) -> list[Problem]:
    """The mistakes with carets; of a text that is no layout at all, the first ones and how many more."""
    shown, rest = mistakes[:_MOST_SHOWN], mistakes[_MOST_SHOWN:]
    problems = [Problem(each.code, each.message, remedy, source.caret(each.column)) for each in shown]
    if rest:
        problems.append(
            Problem(rest[0].code, f"and {len(rest):,} more mistakes from here on", remedy, source.caret(rest[0].column))
        )
    return problems


def _read_rows(layout: Any, source: LayoutSource, problems: list[Problem]) -> tuple[str, ...]:
    if not isinstance(layout, (list, tuple)):
        message = f"a layout is a string or a list with one list per stage, not {type(layout).__name__}"
        problems.append(Problem("PP-E010", message, place=source.key))
        return ()
    if not layout:
        problems.append(Problem("PP-E010", "a layout needs at least one stage", place=source.key))
    stages = []
    for stage, row in enumerate(layout):
        if isinstance(row, list):
            stages.append("".join(_read_layer(item, source.place(stage, i), problems) for i, item in enumerate(row)))
            continue
        message = f"every stage of a layout list is a list of layers, not {type(row).__name__}"
        problems.append(Problem("PP-E010", message, place=f"{source.place(stage)}: {row!r}"))
        stages.append(parse_text(row).stages[0] if isinstance(row, str) else "")
    if sum(map(len, stages)) + len(stages) - 1 > MAX_ITEMS:
        message = (
            f"the layout has {sum(map(len, stages)):,} layers in {len(stages):,} stages; the most is {MAX_ITEMS:,}"
        )
        problems.append(Problem("PP-E008", message, place=source.key))
        return ()
    return tuple(stages)


def _read_layer(item: Any, place: str, problems: list[Problem]) -> str:
    """The letter of one list entry: a member, its name (as Megatron: any case, blanks around it) or a letter."""
    if isinstance(item, str):
        word = item.strip()
        if word in TYPES and word != "e":
            return word
        if word.lower() in LayerType.__members__:
            return LETTERS[LayerType(word.lower())]
    message = f"{item!r} is not a layer: names are embedding, decoder, mtp and loss, letters E, t, m and L"
    problems.append(Problem("PP-E010", message, place=place))
    word = str(item).strip()
    close = difflib.get_close_matches(word.lower(), [*LayerType], n=1)
    return LETTERS[LayerType(close[0])] if close else lookalike(word) if word in _CASES else ""


def _suggestion(parsed: Parsed, nearest: _Nearest) -> str:
    """The repaired text if it is a sound layout, else the nearest sound one."""
    again = parse_text(parsed.repaired)
    stages = parsed.stages if again.mistakes else again.stages
    mended = nearest(stages)
    return parsed.repaired if not again.mistakes and mended == stages else canonical_text(mended)
