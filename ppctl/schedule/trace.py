"""When things ran: Span and Trace, one type for predicted and for measured time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import NamedTuple

from ppctl.schedule.action import COMPUTE, PASSED_ON, Action, Channel, F, Pair


class Span(NamedTuple):
    """One action while it ran: seconds on a clock that all ranks share. Waiting for a message is not part of a span."""

    pp_rank: int
    action: Action
    start: float
    end: float


new_span = partial(tuple.__new__, Span)
"""A span from a tuple, at C speed: simulations have many."""


@dataclass(frozen=True, slots=True)
class Trace:
    """The actions of every pp_rank in one step, with their times. Each rank's spans are in the order of their start."""

    pp: int
    spans: tuple[Span, ...]
    pairs: frozenset[Pair] = frozenset()
    """The pairs of the schedule that ran."""

    def rows(self) -> list[list[Span]]:
        """The spans of every pp_rank, in their order."""
        rows: list[list[Span]] = [[] for _ in range(self.pp)]
        for span in self.spans:
            rows[span[0]].append(span)
        return rows


def step_time(trace: Trace) -> float:
    """Pipeline time in seconds: from the first action's start to the last action's end over all pp_ranks."""
    if not trace.spans:
        return 0.0
    return max([span[3] for span in trace.spans]) - min([span[2] for span in trace.spans])


def longest_span(trace: Trace) -> float:
    """Seconds from the first action's start to the last action's end on the pp_rank where that time is longest."""
    return max((row[-1].end - row[0].start for row in trace.rows() if row), default=0.0)


def bubble_rate(trace: Trace) -> float:
    """1 - (time in F, B, I, W of the busiest pp_rank) / (a pp_rank's longest span): arXiv 2401.10241's bubble."""
    longest = longest_span(trace)
    return max(0.0, 1.0 - max(map(busy_time, trace.rows())) / longest) if longest > 0 else 0.0


def busy_time(spans: Iterable[Span]) -> float:
    """Seconds spent in F, B, I and W."""
    return sum([span[3] - span[2] for span in spans if span[1][0] in COMPUTE])


def bubble_fraction(trace: Trace) -> float:
    """1 - (time in F, B, I, W summed over pp_ranks) / (pp x pipeline time); 0 for an empty trace."""
    total = trace.pp * step_time(trace)
    return 1.0 - busy_time(trace.spans) / total if total > 0 else 0.0


def makers(spans: Iterable[Span]) -> dict[Action, Span]:
    """Action -> the span on a neighbouring stage that made its input; actions without such a span are left out."""
    listed = [span for span in spans if span.action.op in PASSED_ON]
    made = {(op is F, stage, mb): span for span in listed for op, stage, mb in (span.action,)}
    sources: dict[Action, Span] = {}
    for span in listed:
        op, stage, mb = span.action
        source = made.get((op is F, stage - 1 if op is F else stage + 1, mb))
        if source is not None:
            sources[span.action] = source
    return sources


def message_times(steps: Iterable[Iterable[Span]]) -> dict[Channel, float]:
    """Median seconds from the end of the span that makes a message to the start of the span that uses it, by channel.
    Only messages for which a rank idled between two actions count, since others give only a bound; a channel where none
    counts is left out. Spans are on a common clock, each rank's in the order of execution.
    """
    waits: dict[Channel, list[float]] = {}
    for spans in map(list, steps):
        made, idle_since = makers(spans), dict[int, float]()
        for pp_rank, action, start, end in spans:
            before, idle_since[pp_rank] = idle_since.get(pp_rank), end
            source = made.get(action)
            if source is not None and source.pp_rank != pp_rank and before is not None and before <= source.end:
                channel = Channel(source.pp_rank, pp_rank, "F" if action.op is F else "B")
                waits.setdefault(channel, []).append(start - source.end)
    return {channel: median(each) for channel, each in sorted(waits.items())}
