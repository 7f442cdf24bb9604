"""The picture of all schedules side by side: `python scripts/schedules.py` writes docs/pictures/schedules.svg anew.

They are those of `ppctl simulate --compare --pp 4 --microbatches 8 --tf 10 --tb 10 --tw 10`, in the colours of the page
that `--timeline step.html` writes.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from html import escape
from pathlib import Path

from ppctl.cli.simulate import costs
from ppctl.schedule import drawings
from ppctl.schedule.action import Action, Op, Placement
from ppctl.schedule.compare import PolicyFigures, compare
from ppctl.schedule.picture import KINDS
from ppctl.schedule.trace import Span, Trace, step_time

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "schedules.svg"
RANKS, MICROBATCHES = 4, 8
TIMES = Namespace(tf=10, tb=10, tw=10, tcomm=0)

_COLUMNS = 2
_WIDTH, _GAP, _MARGIN = 640, 24, 16
"""Width of a picture, gap between two, and margin around all, in pixels."""
_LANE, _ROW, _HEAD, _FOOT = 15, 18, 38, 14
"""Height of a block, of a rank with what is below it, above the ranks, and below a picture."""
_LABEL = 46
_DIGIT = 7.0
"""The narrowest block that shows the last digit of its microbatch."""

_COLOUR: dict[str, str] = {}
for _name, _value in re.findall(r"--(\w+): (#[0-9a-f]{6})", Path(drawings.__file__).with_name("page.html").read_text()):
    _COLOUR.setdefault(_name, _value)  # the first is the one on light paper


def svg() -> str:
    """The pictures in columns, row by row, with their titles and subtitles; each starts at time 0."""
    compared, _ = compare(RANKS, MICROBATCHES, None, partial(costs, TIMES))
    longest = max(step_time(each.trace) for each in compared)
    scale = (_WIDTH - _LABEL) / longest
    body: list[str] = []
    y = float(_MARGIN)
    for first in range(0, len(compared), _COLUMNS):
        for column, each in enumerate(compared[first : first + _COLUMNS]):
            x = _MARGIN + column * (_WIDTH + _GAP)
            body += [f'<g transform="translate({x},{y:g})">', *_panel(each, scale), "</g>"]
        y += _HEAD + _FOOT + _ROW * RANKS
    body += [f'<g transform="translate({_MARGIN},{y:g})">', *_keys([each.trace for each in compared]), "</g>"]
    width, height = 2 * _MARGIN + _COLUMNS * _WIDTH + (_COLUMNS - 1) * _GAP, y + 2 * _MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height:g}"'
            f' viewBox="0 0 {width} {height:g}" font-family="system-ui, DejaVu Sans, sans-serif" font-size="12">',
            f'<rect width="100%" height="100%" fill="{_COLOUR["paper"]}"/>',
            *body,
            "</svg>\n",
        ]
    )


def _panel(each: PolicyFigures, scale: float) -> Iterator[str]:
    """One schedule, its upper left corner at the origin."""
    trace, place = each.trace, Placement(each.policy.placement, RANKS, RANKS * each.vpp)
    begin = min(span.start for span in trace.spans)
    chunks = f", {each.vpp} chunks per rank" * (each.vpp > 1) + ", in a V" * (each.policy.placement == "v")
    figures = f"step {each.step:.2f} of 1F1B's, bubble {each.bubble_fraction:.0%}, activations {each.activations:.2f}"
    yield f'<text y="12" font-weight="600" fill="{_COLOUR["ink"]}">{escape(each.policy.name + chunks)}</text>'
    yield f'<text y="28" fill="{_COLOUR["soft"]}">{escape(figures)}</text>'
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
            blocks[action.op, place.chunk_of(action.stage)].append(shape)
        numbered = [(span, left, wide) for span, left, wide in drawn if wide >= _DIGIT and span.action.mb >= 0]
        if numbered:
            places = " ".join(f"{left + wide / 2 - 3:.1f}" for _, left, wide in numbered)
            text = "".join(str(span.action.mb % 10) for span, _, _ in numbered)
            digits.append(f'<text x="{places}" y="{top + 11}" fill="#ffffff" font-size="10">{text}</text>')
    for (op, number), shapes in blocks.items():
        faint = 1 - 0.5 * number / each.vpp
        yield f'<path fill="{_colour(op)}" fill-opacity="{faint:.2f}" d="{"".join(shapes)}"/>'
    yield from digits
    if bars := "".join(_bars(trace, scale, begin)):
        yield f'<path fill="{_COLOUR["ink"]}" d="{bars}"/>'


def _bars(trace: Trace, scale: float, begin: float) -> Iterator[str]:
    """Yield the path of a bar below the two blocks of every pair."""
    at: dict[Action, Span] = {span.action: span for span in trace.spans}
    for forward, backward in sorted(trace.pairs):
        left = _LABEL + scale * (at[forward].start - begin) + 2
        wide = scale * (at[backward].end - at[forward].start) - 5
        yield f"M{left:.1f} {_HEAD + _ROW * at[forward].pp_rank + _LANE - 2}h{max(wide, 1):.1f}v2h-{max(wide, 1):.1f}z"


def _keys(traces: Sequence[Trace]) -> Iterator[str]:
    used = {span.action.op for trace in traces for span in trace.spans if span.end > span.start}
    x = 0
    for op, kind in KINDS.items():
        if op in used:
            yield f'<rect x="{x}" y="1" width="12" height="12" rx="2" fill="{_colour(op)}"/>'
            yield f'<text x="{x + 17}" y="12" fill="{_COLOUR["ink"]}">{kind}</text>'
            x += 34 + 7 * len(kind)
    if any(trace.pairs for trace in traces):
        yield f'<rect x="{x}" y="6" width="12" height="2" fill="{_COLOUR["ink"]}"/>'
        yield f'<text x="{x + 17}" y="12" fill="{_COLOUR["ink"]}">a pair</text>'


def _colour(op: Op) -> str:
    return _COLOUR["R" if op is Op.REDUCE_GRAD else op.value]


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
    print(PICTURE.relative_to(ROOT))
