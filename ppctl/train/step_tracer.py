"""Takes a traced step's stamps from every rank (`log.trace`).

Knows the recorder and one gather. Must not know what becomes of a traced step.
"""

from __future__ import annotations

from bisect import bisect_left

from ppctl.comm.groups import gather_rows
from ppctl.config.quantities import steps_of
from ppctl.schedule.measured_step import MeasuredStep, RankStamps
from ppctl.train.session import Session

_PHASES = 4


class StepTracer:
    """Gathers the stamps of the steps that the config names: a collective of the world in each, and nothing else."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.steps = range(0) if session.config.log.trace is None else steps_of(session.config.log.trace)
        self._width = session.plan.longest_row

    def take(self, step: int, phases: tuple[float, float, float, float]) -> MeasuredStep | None:
        """On rank 0, what all ranks did in `step` (from 1); None where nobody asked. `phases`: on this rank's clock."""
        if step not in self.steps:
            return None
        s = self.session
        row = [time + s.recorder.clock_offset for time in phases]
        for index, start, end in s.recorder.stamps_now():
            row += [float(index), start, end]
        row += [-1.0] * (_PHASES + 3 * self._width - len(row))
        rows = gather_rows(row, s.own.rank, s.world_groups)
        if s.own.rank:  # with thousands of ranks these are millions of numbers, and rank 0 alone keeps them
            return None
        return MeasuredStep(step, tuple(_unpack(row) for row in rows.tolist()))


def _unpack(row: list[float]) -> RankStamps:
    begin, pipeline_end, agreed, end = row[:_PHASES]
    indices, starts, ends = (row[_PHASES + place :: 3] for place in range(3))
    stamped = bisect_left(indices, True, key=lambda index: index < 0)  # shorter rows end in -1
    return RankStamps(begin, pipeline_end, agreed, end, [*zip(map(int, indices[:stamped]), starts, ends, strict=False)])
