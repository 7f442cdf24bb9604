"""Picture -> one self-contained HTML page that pans, zooms and explains each block.

Knows how a picture's values are packed for `page.html`, which draws them. Must not know costs or configuration.
Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from ppctl.schedule.picture import KINDS, Picture, RankMemory, memory_over_time
from ppctl.schedule.trace import Trace, bubble_fraction, busy_time, step_time

_TEMPLATE = Path(__file__).with_name("page.html")
_DATA = '"@DATA@"'
_TITLE = "@TITLE@"
_OPS = tuple(KINDS)


def timeline_html(picture: Picture) -> str:
    """The page, as text. Nothing is fetched when it is opened."""
    # `<` cannot end the script early when it is written as an escape.
    data = json.dumps(_packed(picture), separators=(",", ":")).replace("<", "\\u003c")
    page = _TEMPLATE.read_text(encoding="utf-8")
    return page.replace(_TITLE, escape(picture.title)).replace(_DATA, data)


def _packed(picture: Picture) -> dict[str, Any]:
    """Spans by rank as [operation, stage, microbatch, start, end] and levels as [time, bytes], times in ms."""
    trace, planned = picture.trace, picture.planned
    begin = min((span.start for span in trace.spans), default=0.0)

    def levels(memory: Sequence[RankMemory | None]) -> list[list[list[float]]]:
        return [[[_ms(time - begin), held] for time, held in rank] for rank in memory_over_time(trace, memory)]

    total = step_time(trace) or 1.0
    busy = [busy_time(span for span in trace.spans if span.pp_rank == rank) for rank in range(trace.pp)]
    longest = total if planned is None else max(total, step_time(planned))
    return {
        "title": picture.title,
        "subtitle": picture.subtitle,
        "ops": [[op.value, kind] for op, kind in KINDS.items()],
        "total": _ms(longest),
        "step": _ms(step_time(trace)),
        "bubble": bubble_fraction(trace),
        "plan": None if planned is None else [_ms(step_time(planned)), bubble_fraction(planned)],
        "idle": [1.0 - seconds / total for seconds in busy],
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
    rows: list[list[list[float]]] = [[] for _ in range(trace.pp)]
    for pp_rank, (op, stage, mb), start, end in trace.spans:
        rows[pp_rank].append([_OPS.index(op), stage, mb, _ms(start - begin), _ms(end - begin)])
    return rows


def _ms(seconds: float) -> float:
    return round(1e3 * seconds, 6)
