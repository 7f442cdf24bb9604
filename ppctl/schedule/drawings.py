"""The picture of a step as a file: an HTML page that pans, zooms and explains each block, or a trace for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from ppctl.schedule.action import Op
from ppctl.schedule.picture import KINDS, Picture, RankMemory, StageNote, memory_over_time
from ppctl.schedule.trace import Span, Trace, bubble_fraction, busy_time, makers, step_time

_PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_DATA = '"@DATA@"'
_TITLE = "@TITLE@"
_STYLE = "<style>/* @STYLE@ */"
_OPS = tuple(KINDS)


def timeline_html(picture: Picture) -> str:
    """The picture as the text of an HTML page, which fetches nothing when it is opened."""
    return filled(_PAGE, picture.title, _packed(picture))


def filled(page: str, title: str, data: Any) -> str:
    """A page's text with its title, the data of its script and, where marked, the style of all pages."""
    # An escaped `<` cannot end the script early.
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


def perfetto_json(picture: Picture) -> str:
    """The picture as one JSON object: a process for the pipeline; for each pp_rank a thread and counters of memory."""
    events = [*_names(picture), *_spans(picture), *_messages(picture), *_counters(picture)]
    if picture.planned is not None:  # a separate process, from the first measured action on
        begin, zero = (min((s.start for s in t.spans), default=0.0) for t in (picture.trace, picture.planned))
        spans = tuple(s._replace(start=s.start + begin - zero, end=s.end + begin - zero) for s in picture.planned.spans)
        below = replace(picture, title="as planned", trace=replace(picture.planned, spans=spans), planned=None)
        for event in (*_names(below), *_spans(below), *_messages(below)):
            planned = {**event, "pid": 1}
            events.append(planned | {"id": f"planned {event['id']}"} if "id" in event else planned)
    return json.dumps({"displayTimeUnit": "ms", "otherData": {"title": picture.title}, "traceEvents": events})


def _names(picture: Picture) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": picture.title}}
    for pp_rank in range(picture.trace.pp):
        yield {"ph": "M", "pid": 0, "tid": pp_rank, "name": "thread_name", "args": {"name": f"pp_rank {pp_rank}"}}
        yield {"ph": "M", "pid": 0, "tid": pp_rank, "name": "thread_sort_index", "args": {"sort_index": pp_rank}}


def _spans(picture: Picture) -> Iterator[dict[str, Any]]:
    """Complete events ("X") of Chrome's trace format for all ranks' spans; times are in microseconds."""
    notes = {note.stage: note for note in picture.stages}
    pairs = {action: str(pair) for pair in picture.trace.pairs for action in pair}
    for span in picture.trace.spans:
        yield {
            "ph": "X",
            "pid": 0,
            "tid": span.pp_rank,
            "name": str(span.action),
            "cat": KINDS[span.action.op],
            "ts": 1e6 * span.start,
            "dur": 1e6 * (span.end - span.start),
            "args": _arguments(span, notes.get(span.action.stage), pairs.get(span.action)),
        }


def _messages(picture: Picture) -> Iterator[dict[str, Any]]:
    """Arrows from the span that made a message to the span that used it, on another pp_rank."""
    made = makers(picture.trace.spans)
    for rank, action, start, _ in picture.trace.spans:
        if (source := made.get(action)) is None or source.pp_rank == rank:
            continue
        op, stage, mb = action
        arrow = {"pid": 0, "cat": "message", "name": f"{'activations' if op is Op.F else 'gradients'} of {mb}"}
        arrow["id"] = f"{op.value}{stage}.{mb}"
        yield {"ph": "s", "tid": source.pp_rank, "ts": 1e6 * source.end, **arrow}
        yield {"ph": "f", "bp": "e", "tid": rank, "ts": 1e6 * start, **arrow}


def _arguments(span: Span, note: StageNote | None, pair: str | None) -> dict[str, Any]:
    shown: dict[str, Any] = {"stage": span.action.stage}
    if span.action.mb >= 0:
        shown["microbatch"] = span.action.mb
    if note is not None:
        shown |= {"chunk": note.vpp_rank, **({"layers": note.layers} if note.layers else {})}
    if pair is not None:
        shown["pair"] = pair
    return shown


def _counters(picture: Picture) -> Iterator[dict[str, Any]]:
    for name, memory in (("memory", picture.memory), ("measured memory", picture.measured)):
        for pp_rank, levels in enumerate(memory_over_time(picture.trace, memory)):
            for time, held in levels:
                yield {
                    "ph": "C",
                    "pid": 0,
                    "name": f"{name} of pp_rank {pp_rank}",
                    "ts": 1e6 * time,
                    "args": {"GiB": held / 2**30},
                }
