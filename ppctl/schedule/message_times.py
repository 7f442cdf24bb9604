"""How long messages took, read off a measured step.

Knows spans and who uses whose result. Must not know how messages travel, or where spans come from. Standard library
only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median

from ppctl.schedule.action import PASSED_ON, Channel, Op, Placement
from ppctl.schedule.trace import Span


def message_times(steps: Iterable[Iterable[Span]], placement: Placement) -> dict[Channel, float]:
    """Median seconds from the end of what makes a message to the start of what uses it, by channel.

    Counted are messages that a rank stood idle for, between two of its actions: sending, waiting and waking up, as a
    schedule feels them. Other messages give only a bound; a channel that has no message that counts is left out. Spans
    are on a common clock, those of a rank in the order in which it ran them.
    """
    waits: dict[Channel, list[float]] = {}
    for spans in steps:
        for channel, seconds in _waits(list(spans), placement):
            waits.setdefault(channel, []).append(seconds)
    return {channel: median(each) for channel, each in sorted(waits.items())}


def _waits(spans: list[Span], placement: Placement) -> Iterator[tuple[Channel, float]]:
    made = {(op is Op.F, stage, mb): end for _, (op, stage, mb), _, end in spans if op in PASSED_ON}
    idle_since: dict[int, float] = {}
    for pp_rank, (op, stage, mb), start, end in spans:
        before, idle_since[pp_rank] = idle_since.get(pp_rank), end
        maker = stage - 1 if op is Op.F else stage + 1
        sent = made.get((op is Op.F, maker, mb)) if op in PASSED_ON else None
        source = placement.rank_of(maker) if sent is not None else pp_rank
        if sent is not None and source != pp_rank and before is not None and before <= sent:
            yield Channel(source, pp_rank, "F" if op is Op.F else "B"), start - sent
