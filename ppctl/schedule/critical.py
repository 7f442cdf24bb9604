"""The longest chain of a step: which actions, one after the other, make it as long as it is.

Knows spans and the dependency rule. Must not know prices or models. Standard library only.
"""

from __future__ import annotations

from ppctl.schedule.action import BACKWARDS, INPUT_GRADIENTS, Action, F, Schedule, input_gradient_of
from ppctl.schedule.trace import Span, Trace

KINDS = ("forward", "backward", "messages", "gradients")


def critical_path(schedule: Schedule, trace: Trace) -> list[Span]:
    """The spans that end in the last one, in order, each started by the end (and the message) of the one before it."""
    ends: dict[Action, Span] = {}
    before: dict[Action, Span | None] = {}
    last: dict[int, Span] = {}
    for span in trace.spans:
        ends[span.action] = span
        before[span.action] = last.get(span.pp_rank)
        last[span.pp_rank] = span
    if not ends:
        return []
    path = [max(trace.spans, key=lambda span: span.end)]
    while (reason := _reason(path[-1].action, schedule, ends, before)) is not None:
        path.append(reason)
    return path[::-1]


def _reason(
    action: Action, schedule: Schedule, ends: dict[Action, Span], before: dict[Action, Span | None]
) -> Span | None:
    """What an action waited for: the later of its rank's previous action and what it needs from its neighbour."""
    neighbour = _needed(action, schedule)
    candidates = [span for span in (before[action], ends.get(neighbour) if neighbour else None) if span is not None]
    return max(candidates, key=lambda span: span.end, default=None)


def _needed(action: Action, schedule: Schedule) -> Action | None:
    op, stage, mb = action
    if op is F:
        return Action(F, stage - 1, mb) if stage else None
    if op in INPUT_GRADIENTS:
        return None if stage == schedule.placement.num_stages - 1 else input_gradient_of(stage + 1, mb, schedule)
    return None


def seconds_by_kind(path: list[Span]) -> dict[str, float]:
    """How a critical path's time divides: what lies between two spans is a message on its way."""
    found = dict.fromkeys(KINDS, 0.0)
    for index, (_, (op, _, _), start, end) in enumerate(path):
        kind = "forward" if op is F else "backward" if op in BACKWARDS else "gradients"
        found[kind] += end - start
        if index:
            found["messages"] += start - path[index - 1].end
    return found
