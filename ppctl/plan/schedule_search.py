"""`pipeline.pp_schedule=auto`: the schedule that makes the simulated step shortest within the memory.

Knows what the config's stages cost and hold, what a rank may hold of activations, and what is reported. Must not know
how a search goes (`schedule/search`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil
from typing import NamedTuple

from ppctl.plan.config_values import ConfigValues
from ppctl.plan.memory_limit import LIMIT, device_limit
from ppctl.plan.plan import Plan
from ppctl.plan.prices import predicted, simulation_costs
from ppctl.plan.schedule_choice import GROUP, MEMORY, SCHEDULE, Choice, proved
from ppctl.plan.types import Derived, DeviceLimit, RankCost, StageCost, StageSpec
from ppctl.plan.violations import Violation, Violations
from ppctl.schedule.action import COMPUTE, Placement, Schedule
from ppctl.schedule.policies import AUTO
from ppctl.schedule.search import ALLOWANCE, Found, find_schedule
from ppctl.schedule.search_task import Task, least_limits, named_schedules, placements, unit_of_memory
from ppctl.schedule.trace import step_time
from ppctl.topology import ParallelSizes

LESS_THAN_ANY = "PP-E321"

_AGAIN = 3
"""How often a search is made again with less memory, where the receives of what it found did not fit."""


class Way(NamedTuple):
    """One placement of the stages, what they cost there, and what ranks hold and compute again under a schedule."""

    placement: Placement
    stages: tuple[StageSpec, ...]
    costs: tuple[StageCost, ...]
    rank_costs: Callable[[Schedule], Sequence[RankCost]]
    again: Sequence[int]
    """Bytes that a stage computes again while its backward runs."""


class Searched(NamedTuple):
    """The choice that a search came to, and the seconds of a call under it."""

    choice: Choice
    seconds: float


def check_memory(
    values: ConfigValues, costs: Sequence[StageCost], num_microbatches: int, violations: Violations
) -> None:
    """Refuse a `pipeline.schedule_memory` that no schedule keeps."""
    if values[MEMORY] is None:
        return
    pp, kept = values["pp"], [cost.activation_bytes for cost in costs]
    least = min(
        max(least_limits(placement, kept)) / (unit_of_memory(kept, pp, num_microbatches) or 1.0)
        for placement in placements(pp, len(costs) // pp)
    )
    if values[MEMORY] >= least:
        return
    enough = ceil(100 * least) / 100
    message = (
        f"{MEMORY}={values[MEMORY]:g}: one microbatch on the stages of a rank takes {least:.3g} of what 1F1B keeps on "
        "its first rank, and no schedule needs less"
    )
    place = values.cite(MEMORY, "pp", "vpp", "layout")
    violations.append(Violation(LESS_THAN_ANY, MEMORY, message, place, {MEMORY: enough}, {MEMORY: None}))


def search_schedule(
    values: ConfigValues, sizes: ParallelSizes, ways: Sequence[Way], num_microbatches: int, share: int = 1
) -> Searched:
    """Search all ways, with a part of the allowance each; `share` is how many such calls there are."""
    allowance = ALLOWANCE // len(ways) // share
    results = [_searched(values, sizes, way, num_microbatches, allowance) for way in ways]
    return min(results, key=lambda result: result.seconds)


def kept_choice(plan: Plan | None, layout: str, sizes: ParallelSizes, num_microbatches: int) -> Choice | None:
    """The schedule of a run's earlier plan, where that is for the same pipeline: a run keeps what was found for it."""
    if plan is None or plan.layout != layout or plan.num_microbatches != num_microbatches:
        return None
    if (plan.sizes.pp, plan.sizes.vpp) != (sizes.pp, sizes.vpp):
        return None
    rows = tuple(tuple(action for action in row if action.op in COMPUTE) for row in plan.schedule.actions)
    schedule = replace(plan.schedule, actions=rows, capacities={}, batched=False)
    equation = f"schedule {schedule.name}: kept from the run's earlier start; {SCHEDULE}={AUTO} found it there"
    return Choice(schedule.name, (Derived("schedule", schedule.name, equation),), schedule)


def timed(values: ConfigValues, ways: Sequence[Way], choice: Choice) -> float:
    """Seconds of a call under a choice that holds a schedule."""
    assert choice.schedule is not None
    return next(_seconds(values, way, choice.schedule) for way in ways if way.placement == choice.schedule.placement)


def with_rival(choice: Choice, name: str, layout: str, seconds: float) -> Choice:
    """With a line on the best named schedule on the layout that suits it best, whatever memory it takes."""
    equation = f"beside it {name} {seconds:.4g} s a call: the best named schedule, on its best layout {layout}"
    return choice._replace(derived=(*choice.derived, Derived("named schedule", name, equation)))


def _searched(values: ConfigValues, sizes: ParallelSizes, way: Way, num_microbatches: int, allowance: int) -> Searched:
    """What is found on one placement, timed as the plan times it: with messages, capacities and gradient sums.

    Named schedules that fit are timed so, too: in batches the order that was best without them need not be.
    """
    device = device_limit(values.config.launch, sizes)
    kept = [float(cost.activation_bytes) for cost in way.costs]
    prices, group = simulation_costs(way.costs, way.stages), values[GROUP] if values.is_set(GROUP) else None
    least = least_limits(way.placement, kept)
    task = Task(way.placement, num_microbatches, prices, kept, least, group)
    limits = _limits(values, way, task, device)
    for _ in range(_AGAIN):
        found = find_schedule(replace(task, limits=[max(pair) for pair in zip(limits, least, strict=True)]), allowance)
        peaks = [cost.peak_bytes for cost in way.rank_costs(proved(values, found.schedule).schedule)]
        over = [max(0, peak - device.available_bytes) if device else 0 for peak in peaks]
        if not any(over):
            break
        limits = [limit - more for limit, more in zip(limits, over, strict=True)]
    timed = [(_seconds(values, way, schedule), schedule) for schedule in _candidates(found)]
    seconds, schedule = min(timed, key=lambda each: float(f"{each[0]:.9g}"))  # of equal ones the first
    named = min((each for each in timed if each[1].name != AUTO), key=lambda each: each[0], default=None)
    equation = _equation(schedule, seconds, named, found, _within(values, device is not None))
    return Searched(Choice(schedule.name, (Derived("schedule", schedule.name, equation),), schedule), seconds)


def _candidates(found: Found) -> list[Schedule]:
    others = [each.schedule for each in found.named if each.schedule != found.schedule]
    return [found.schedule, *others]


def _seconds(values: ConfigValues, way: Way, plain: Schedule) -> float:
    """Of one call, as the plan predicts it."""
    proof = proved(values, plain)
    trace = predicted(plain if proof.wrong else proof.schedule, simulation_costs(way.costs, way.stages))
    return step_time(trace)


def _limits(values: ConfigValues, way: Way, task: Task, device: DeviceLimit | None) -> list[float]:
    """Bytes of activations that each rank may hold."""
    pp, asked = task.placement.pp, values[MEMORY]
    limits = [float("inf")] * pp
    if asked is not None or device is None:
        unit = unit_of_memory(task.sizes, pp, task.num_microbatches)
        limits = [(1.0 if asked is None else asked) * unit] * pp
    if device is not None:
        plain = next(named_schedules(task))
        for r, cost in enumerate(way.rank_costs(proved(values, plain).schedule)):
            again = max(way.again[stage] for stage in task.placement.stages_of(r))
            rest = device.available_bytes - (cost.peak_bytes - cost.activation_bytes) - again
            limits[r] = min(limits[r], float(rest))
    return limits


def _within(values: ConfigValues, on_device: bool) -> str:
    asked = values[MEMORY]
    parts = [f"{MEMORY}={asked:g}"] if asked is not None else []
    parts += [LIMIT] if on_device else []
    return " and ".join(parts) or "the activations that 1F1B keeps on its first rank"


def _equation(
    schedule: Schedule, seconds: float, named: tuple[float, Schedule] | None, found: Found, within: str
) -> str:
    beside = "no named schedule fits" if named is None else f"best named {named[1].name} {named[0]:.4g} s"
    kind = "V" if schedule.placement.kind == "v" else "loop"
    what = "found" if schedule.name == AUTO else "as good as any that was found"
    return (
        f"schedule {schedule.name} {seconds:.4g} s a call, stages placed as a {kind}: {what} among {found.tried:,} "
        f"orders within {within}; {beside}; no order takes less than {found.bound:.4g} s"
    )
