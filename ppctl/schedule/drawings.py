"""The picture of a step as one self-contained HTML page that pans, zooms and explains each block."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ppctl.schedule.picture import KINDS, Picture, RankMemory, memory_over_time
from ppctl.schedule.trace import Trace, bubble_fraction, busy_time, step_time

_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_DATA = '"@DATA@"'
_TITLE = "@TITLE@"
_STYLE = "<style>/* @STYLE@ */"
_OPS = tuple(KINDS)


def timeline_html(picture: Picture) -> str:
    """The page, as text. Nothing is fetched when it is opened."""
    return filled(_PAGE, picture.title, _packed(picture))


def filled(page: str, title: str, data: Any) -> str:
    """A page's text with its title, the data of its script and, where it asks for it, the style of all pages."""
    # `<` cannot end the script early when it is written as an escape.
    packed = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    style = _PAGE[_PAGE.index("<style>") : _PAGE.index("</style>")]
    return page.replace(_STYLE, style).replace(_TITLE, escape(title)).replace(_DATA, packed)


def _packed(picture: Picture) -> dict[str, Any]:
    """Spans by rank as [operation, stage, microbatch, start, end] and levels as [time, bytes], times in ms."""
    trace, planned = picture.trace, picture.planned
    begin = min((span.start for span in trace.spans), default=0.0)

    def levels(memory: Sequence[RankMemory | None]) -> list[list[list[float]]]:
        return [[[_ms(time - begin), held] for time, held in rank] for rank in memory_over_time(trace, memory)]

    total = step_time(trace) or 1.0
    longest = total if planned is None else max(total, step_time(planned))
    return {
        "title": picture.title,
        "subtitle": picture.subtitle,
        "ops": [[op.value, kind] for op, kind in KINDS.items()],
        "total": _ms(longest),
        "step": _ms(step_time(trace)),
        "bubble": bubble_fraction(trace),
        "plan": None if planned is None else [_ms(step_time(planned)), bubble_fraction(planned)],
        "idle": [1.0 - busy_time(row) / total for row in trace.rows()],
        "spans": _rows(trace),
        "planned": [] if planned is None else _rows(planned),
        "memory": levels(picture.memory),
        "measured": levels(picture.measured),
        "pairs": [[[_OPS.index(op), stage, mb] for op, stage, mb in pair] for pair in sorted(trace.pairs)],
        "limit": picture.limit,
        "stages": [[n.stage, n.pp_rank, n.vpp_rank, n.layers, list(n.facts)] for n in picture.stages],
    }


def _rows(trace: Trace) -> list[list[list[float]]]:
    """The spans of each rank, in ms from the first action on."""
    begin = min((span.start for span in trace.spans), default=0.0)
    return [
        [[_OPS.index(op), stage, mb, _ms(start - begin), _ms(end - begin)] for _, (op, stage, mb), start, end in row]
        for row in trace.rows()
    ]


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 6)
