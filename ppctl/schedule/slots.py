"""A schedule as torch's compute-only CSV: a row per pp_rank, a column per time slot, an empty cell where a rank idles.

Knows slots of equal length. Must not know prices. Standard library only.
"""

from __future__ import annotations

from dataclasses import replace

from ppctl.schedule.action import COMPUTE, Schedule
from ppctl.schedule.simulate import Costs, simulate


def to_slots(schedule: Schedule) -> str:
    """The CSV of what is computed, without messages and gradient sync, every action in the first slot that it can have.

    What torch's `_load_csv(format="compute_only")` and `Schedule.from_csv` read. Raises ScheduleError for a schedule
    that hangs.
    """
    rows = tuple(tuple(action for action in row if action.op in COMPUTE) for row in schedule.actions)
    plain = replace(schedule, actions=rows, capacities={})
    stages = schedule.placement.num_stages
    one = (1.0,) * stages
    spans = simulate(plain, Costs(one, one, one, one)).spans
    columns = round(max((span.end for span in spans), default=0.0))
    cells = [[""] * columns for _ in rows]
    for span in spans:
        cells[span.pp_rank][round(span.start)] = str(span.action)
    return "".join(",".join(row) + "\n" for row in cells)
