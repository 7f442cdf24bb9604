"""Trace -> text for a terminal: a line per stage, time to the right."""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections.abc import Collection, Sequence

from ppctl.schedule.action import COMPUTE, Action, Op
from ppctl.schedule.trace import Span, Trace, bubble_fraction, step_time

_FIRST = {Op.F: "0", Op.B: "a", Op.I: "a", Op.W: "A"}
_FIRST_OF_PAIR = "k"
"""In place of `a` for a backward that is paired with the forward before it."""
_NARROWEST = 40
_USUAL = 80
"""Columns of a usual terminal: the legend is not wrapped for narrower ones."""


def timeline_text(trace: Trace, width: int = 100, seconds: float | None = None) -> str:
    """The trace drawn in at most `width` columns (at least 40), a line for every stage of every pp_rank.

    The columns show `seconds` from the step's first action on; None: the whole step.

    A column shows what runs in its middle: the last digit of the microbatch, as a digit for a forward and as a letter
    for a backward (`a` is 0, `k` as well if it is paired with the forward in front of it). Dots are the rank's idle
    time, blanks are time that it spends on its other stages.
    """
    paired = {pair.backward for pair in trace.pairs}
    rows = [[span for span in row if span.action.op in COMPUTE] for row in trace.rows()]
    owned = [sorted({span.action.stage for span in row}) for row in rows]
    labels = [
        [f"{f'rank {r}' if stage == stages[0] else '':8}stage {stage}" for stage in stages]
        for r, stages in enumerate(owned)
    ]
    margin = max((len(label) for column in labels for label in column), default=0) + 1
    columns = max(width, _NARROWEST) - margin - 2
    begin = min((span.start for span in trace.spans), default=0.0)
    tick = (step_time(trace) if seconds is None else seconds) / columns
    lines = [textwrap.fill(_legend(trace), max(width, _USUAL), subsequent_indent="  ")]
    for row, stages, names in zip(rows, owned, labels, strict=True):
        shown = _shown(row, [begin + (column + 0.5) * tick for column in range(columns)])
        for stage, name in zip(stages, names, strict=True):
            lines.append(f"{name:{margin}}|{''.join(_mark(action, stage, paired) for action in shown)}|")
    figures = f"{step_time(trace):.4g} s ({tick:.2g} s a column), bubble {bubble_fraction(trace):.1%}"
    return "\n".join([*lines, " " * (margin + 1) + figures]) + "\n"


def _legend(trace: Trace) -> str:
    split = any(span.action.op is Op.W for span in trace.spans)
    backward = "a-j input gradient, A-J weight gradient" if split else "a-j backward"
    pairs = ", k-t the same of a backward that is paired with the forward in front of it (k is 0)" * bool(trace.pairs)
    return f"last digit of the microbatch: 0-9 forward, {backward} (a is 0){pairs}; dots are idle"


def _shown(row: Sequence[Span], times: Sequence[float]) -> list[Action | None]:
    starts = [span.start for span in row]
    under = [row[bisect_right(starts, time) - 1] if starts and time >= starts[0] else None for time in times]
    return [span.action if span and time < span.end else None for span, time in zip(under, times, strict=True)]


def _mark(action: Action | None, stage: int, paired: Collection[Action]) -> str:
    if action is None:
        return "."
    first = _FIRST_OF_PAIR if action in paired else _FIRST[action.op]
    return chr(ord(first) + action.mb % 10) if action.stage == stage else " "
