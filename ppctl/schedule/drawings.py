"""Pictures as files: one self-contained HTML page that pans, zooms and explains each block, and SVG side by side."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from ppctl.schedule.action import Action, Op
from ppctl.schedule.picture import KINDS, Picture, RankMemory, memory_over_time
from ppctl.schedule.trace import Span, Trace, bubble_fraction, busy_time, step_time

_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_DATA = '"@DATA@"'
_TITLE = "@TITLE@"
_STYLE = "<style>/* @STYLE@ */"
_OPS = tuple(KINDS)

_WIDTH, _GAP, _MARGIN = 640, 24, 16
"""Width of a picture, gap between two, and margin around all, in pixels."""
_LANE, _ROW, _HEAD, _FOOT = 15, 18, 38, 14
"""Height of a block, of a rank with what is below it, above the ranks, and below a picture."""
_LABEL = 46
_DIGIT = 7.0
"""The narrowest block that shows the last digit of its microbatch."""

_COLOUR: dict[str, str] = {}
for _name, _value in re.findall(r"--(\w+): (#[0-9a-f]{6})", _PAGE):
    _COLOUR.setdefault(_name, _value)  # the first is the one on light paper


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


def picture_svg(picture: Picture) -> str:
    """One picture, with what was planned below what was measured."""
    if picture.planned is None:
        return pictures_svg([picture])
    below = replace(picture, title="as planned", trace=picture.planned, planned=None)
    return pictures_svg([replace(picture, planned=None), below], columns=1)


def pictures_svg(pictures: Sequence[Picture], columns: int = 2) -> str:
    """The pictures in columns, row by row, with their titles and subtitles; each starts at time 0."""
    columns = min(columns, len(pictures))
    longest = max((step_time(picture.trace) for picture in pictures), default=0.0) or 1.0
    scale = (_WIDTH - _LABEL) / longest
    body: list[str] = []
    y = float(_MARGIN)
    for first in range(0, len(pictures), columns):
        row = pictures[first : first + columns]
        for column, picture in enumerate(row):
            x = _MARGIN + column * (_WIDTH + _GAP)
            body += [f'<g transform="translate({x},{y:g})">', *_panel(picture, scale), "</g>"]
        y += _HEAD + _FOOT + _ROW * max(picture.trace.pp for picture in row)
    used = {span.action.op for picture in pictures for span in picture.trace.spans if span.end > span.start}
    paired = any(picture.trace.pairs for picture in pictures)
    body += [f'<g transform="translate({_MARGIN},{y:g})">', *_keys(used, paired=paired), "</g>"]
    width, height = 2 * _MARGIN + columns * _WIDTH + (columns - 1) * _GAP, y + 2 * _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}"'
            f' viewBox="0 0 {width} {height:g}" font-family="system-ui, DejaVu Sans, sans-serif" font-size="12">',
            f'<rect width="100%" height="100%" fill="{_COLOUR["paper"]}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(picture: Picture, scale: float) -> Iterator[str]:
    """One picture, its upper left corner at the origin."""
    trace = picture.trace
    begin = min((span.start for span in trace.spans), default=0.0)
    chunk = {note.stage: note.vpp_rank for note in picture.stages}
    chunks = 1 + max(chunk.values(), default=0)
    yield f'<text y="12" font-weight="600" fill="{_COLOUR["ink"]}">{escape(picture.title)}</text>'
    yield f'<text y="28" fill="{_COLOUR["soft"]}">{escape(picture.subtitle)}</text>'
    blocks: defaultdict[tuple[Op, int], list[str]] = defaultdict(list)
    digits: list[str] = []
    for pp_rank, row in enumerate(trace.rows()):
        top = _HEAD + _ROW * pp_rank
        yield f'<text y="{top + 11}" fill="{_COLOUR["soft"]}">rank {pp_rank}</text>'
        wide = scale * step_time(trace)
        yield f'<rect x="{_LABEL}" y="{top}" width="{wide:.1f}" height="{_LANE}" fill="{_COLOUR["lane"]}"/>'
        spans = [span for span in row if span.end > span.start]
        drawn = [(span, _LABEL + scale * (span.start - begin), scale * (span.end - span.start)) for span in spans]
        for (_, action, _, _), left, wide in drawn:
            shape = f"M{left:.1f} {top}h{max(wide - 1, 0.5):.1f}v{_LANE}h-{max(wide - 1, 0.5):.1f}z"
            blocks[action.op, chunk.get(action.stage, 0)].append(shape)
        numbered = [(span, left, wide) for span, left, wide in drawn if wide >= _DIGIT and span.action.mb >= 0]
        if numbered:
            places = " ".join(f"{left + wide / 2 - 3:.1f}" for _, left, wide in numbered)
            text = "".join(str(span.action.mb % 10) for span, _, _ in numbered)
            digits.append(f'<text x="{places}" y="{top + 11}" fill="#ffffff" font-size="10">{text}</text>')
    for (op, number), shapes in blocks.items():
        faint = 1 - 0.5 * number / chunks
        yield f'<path fill="{_colour(op)}" fill-opacity="{faint:.2f}" d="{"".join(shapes)}"/>'
    yield from digits
    if bars := "".join(_bars(picture, scale, begin)):
        yield f'<path fill="{_COLOUR["ink"]}" d="{bars}"/>'


def _bars(picture: Picture, scale: float, begin: float) -> Iterator[str]:
    """Yield the path of a bar below the two blocks of every pair."""
    at: dict[Action, Span] = {span.action: span for span in picture.trace.spans}
    for forward, backward in sorted(picture.trace.pairs):
        left = _LABEL + scale * (at[forward].start - begin) + 2
        wide = scale * (at[backward].end - at[forward].start) - 5
        yield f"M{left:.1f} {_HEAD + _ROW * at[forward].pp_rank + _LANE - 2}h{max(wide, 1):.1f}v2h-{max(wide, 1):.1f}z"


def _keys(used: set[Op], *, paired: bool) -> Iterator[str]:
    x = 0
    for op, kind in KINDS.items():
        if op in used:
            yield f'<rect x="{x}" y="1" width="12" height="12" rx="2" fill="{_colour(op)}"/>'
            yield f'<text x="{x + 17}" y="12" fill="{_COLOUR["ink"]}">{kind}</text>'
            x += 34 + 7 * len(kind)
    if paired:
        yield f'<rect x="{x}" y="6" width="12" height="2" fill="{_COLOUR["ink"]}"/>'
        yield f'<text x="{x + 17}" y="12" fill="{_COLOUR["ink"]}">a pair</text>'


def _colour(op: Op) -> str:
    return _COLOUR["R" if op is Op.REDUCE_GRAD else op.value]
