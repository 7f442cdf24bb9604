"""What a step of the engine benchmark cost, read off its spans: actions, what a host does between two, and messages.

Knows spans. Must not know workloads or how a step came about.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

from ppctl.schedule.action import PASSED_ON, Op, Placement
from ppctl.schedule.simulate import Costs
from ppctl.schedule.trace import Span, message_times

Row = Sequence[Span]
"""One rank's spans, in its order."""


def usual_message(rows: Iterable[Row]) -> tuple[float, dict]:
    """(seconds of a message, by channel where a rank stood idle for one): from the end of an action to the next one."""
    messages = message_times([[span for row in rows for span in row]])
    return (statistics.median(messages.values()) if messages else 0.0), messages


def measured_costs(rows: Sequence[Row], where: Placement) -> Costs:
    """Costs with which a simulation should come to the step's own time: means of the actions' times, and medians else.

    What a host does behind an action (its send, the next receives) delays its next action as if the action took longer,
    and is part of the time that its message takes: there it is taken off.
    """
    between = _between(rows, where)
    times: dict[tuple[Op, int], list[float]] = defaultdict(list)
    for row in rows:
        for _, (op, stage, _), start, end in row:
            times[op, stage].append(end - start)

    def mean(op: Op) -> list[float]:
        found = (times.get((op, stage)) for stage in range(where.num_stages))
        behind = between if op in PASSED_ON else 0.0
        return [statistics.fmean(each) + behind if each else 0.0 for each in found]

    usual, messages = usual_message(rows)
    return Costs(
        mean(Op.F),
        mean(Op.B),
        mean(Op.I),
        mean(Op.W),
        message=max(0.0, usual - between),
        messages={channel: max(0.0, seconds - between) for channel, seconds in messages.items()},
    )


def _between(rows: Sequence[Row], where: Placement) -> float:
    """Median seconds of a rank from one action, whose result it sends, to the next one, whose message had long come."""
    made = {(op is Op.F, stage, mb): end for row in rows for _, (op, stage, mb), _, end in row if op in PASSED_ON}
    found = []
    for row in rows:
        for (_, action, begun, ended), (_, (op, stage, mb), start, _) in pairwise(row):
            needed = made.get((op is Op.F, stage - 1 if op is Op.F else stage + 1, mb)) if op in PASSED_ON else None
            if action.op in PASSED_ON and (needed is None or needed < begun):
                found.append(start - ended)
    return statistics.median(found) if found else 0.0
