"""Simulates a measured step again: the seconds of every stage, and of the step if one stage took less."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ppctl.schedule.action import Op, Schedule
from ppctl.schedule.simulate import Costs, simulate
from ppctl.schedule.trace import Trace, message_times, step_time

SHARE = 0.1
"""The share by which a stage is made faster or slower."""


class StageChange(NamedTuple):
    """A stage as it was measured, and what the step would gain or lose by it. Seconds."""

    stage: int
    forward: float
    """Mean of F."""
    backward: float
    """Mean of B, or of I and W together."""
    faster: float
    """Change of the step if the stage's work took a tenth less time."""
    slower: float
    """Change of the step if the stage's work took a tenth more time."""


def mean_seconds(trace: Trace) -> dict[Op, dict[int, float]]:
    """Operation -> stage -> mean duration."""
    sums: dict[Op, dict[int, list[float]]] = {op: {} for op in Op}
    for _, (op, stage, _), start, end in trace.spans:
        sums[op].setdefault(stage, []).append(end - start)
    return {op: {stage: sum(of) / len(of) for stage, of in stages.items()} for op, stages in sums.items()}


def measured_costs(trace: Trace, schedule: Schedule) -> Costs:
    """Prices by which the schedule can be simulated again: means by operation and stage, medians of messages.

    If a stage ran only unsplit backwards, I and W each count as half of one; if it ran only split ones, B as their sum.
    """
    means, stages = mean_seconds(trace), range(schedule.placement.num_stages)
    halves = {op: [means[op].get(s, means[Op.B].get(s, 0.0) / 2) for s in stages] for op in (Op.I, Op.W)}
    whole = [means[Op.B].get(s, halves[Op.I][s] + halves[Op.W][s]) for s in stages]
    channels = message_times([trace.spans])
    usual = sorted(channels.values())[len(channels) // 2] if channels else 0.0
    return Costs(
        [means[Op.F].get(s, 0.0) for s in stages],
        whole,
        halves[Op.I],
        halves[Op.W],
        [means[Op.REDUCE_GRAD].get(s, 0.0) for s in stages],
        usual,
        channels,
    )


def stage_changes(schedule: Schedule, costs: Costs) -> tuple[float, list[StageChange]]:
    """(seconds of the simulated step, what each stage would change of it)."""
    now = step_time(simulate(schedule, costs))

    def changed(stage: int, factor: float) -> float:
        return step_time(simulate(schedule, _scaled(costs, stage, factor))) - now

    return now, [
        StageChange(s, costs.forward[s], costs.backward[s], changed(s, 1 - SHARE), changed(s, 1 + SHARE))
        for s in range(schedule.placement.num_stages)
    ]


def _scaled(costs: Costs, stage: int, factor: float) -> Costs:
    def scaled(seconds: Sequence[float] | None) -> list[float] | None:
        return None if seconds is None else [each * (factor if s == stage else 1) for s, each in enumerate(seconds)]

    names = ("forward", "backward", "input_gradient", "weight_gradient")
    changed: dict[str, Any] = {name: scaled(getattr(costs, name)) for name in names}
    return replace(costs, **changed)
