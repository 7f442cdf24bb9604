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
from ppctl.plan.memory import Held
from ppctl.plan.memory_limit import LIMIT, device_limit
from ppctl.plan.plan import Plan
from ppctl.plan.prices import predicted, simulation_costs
from ppctl.plan.schedule_choice import GROUP, MEMORY, SCHEDULE, Choice, Proof, proved
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
"""How many searches there are at most, each with less memory and a smaller part of the allowance than the one before,
where what was found does not fit: its receives and its sums of gradients are known only then."""


class Way(NamedTuple):
    """One placement of the stages, what they cost and hold there, and what ranks hold under a schedule."""

    placement: Placement
    stages: tuple[StageSpec, ...]
    costs: tuple[StageCost, ...]
    rank_costs: Callable[[Schedule], Sequence[RankCost]]
    held: Sequence[Held]


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
    proof = proved(values, choice.schedule)
    return next(_seconds(way, proof) for way in ways if way.placement == choice.schedule.placement)


def with_rival(choice: Choice, name: str, layout: str, seconds: float) -> Choice:
    """With a line on the best named schedule on the layout that suits it best, whatever memory it takes."""
    equation = f"beside it {name} {seconds:.4g} s a call: the best named schedule, on its best layout {layout}"
    return choice._replace(derived=(*choice.derived, Derived("named schedule", name, equation)))


class _Timed(NamedTuple):
    """A candidate as the plan judges it: lowered, with capacities, messages and gradient sums."""

    excess: float
    """Bytes over the device, of all ranks."""
    seconds: float
    number: int
    """Of equal candidates the first is taken."""
    schedule: Schedule


def _searched(values: ConfigValues, sizes: ParallelSizes, way: Way, num_microbatches: int, allowance: int) -> Searched:
    """The best of what is found on one placement and of the named schedules, by the plan's own bytes and seconds.

    In a device's memory what waits for W counts as what it is; under `pipeline.schedule_memory` activations are whole
    until W. Where nothing fits, it is what exceeds the device least.
    """
    device, whole = device_limit(values.config, sizes), values[MEMORY] is not None
    prices, group = simulation_costs(way.costs, way.stages), values[GROUP] if values.is_set(GROUP) else None
    kept = [float(each.kept) for each in way.held]
    put_off = None if whole or device is None else [float(each.put_off) for each in way.held]
    least = least_limits(way.placement, kept, put_off)
    task = Task(way.placement, num_microbatches, prices, kept, least, group, put_off)
    limits = _limits(values, way, task, device)
    results: list[Found] = []
    for search in range(1, 1 + _AGAIN):
        within = [max(pair) for pair in zip(limits, least, strict=True)]
        results.append(find_schedule(replace(task, limits=within), allowance // search))
        over = _over(way, device, proved(values, results[-1].schedule).schedule)
        if not any(over):
            break
        spent = zip(limits, results[-1].held, over, strict=True)
        limits = [(min(limit, held) if more else limit) - max(over) for limit, held, more in spent]
    named = named_schedules(task) if put_off is not None else (each.schedule for each in results[0].named)
    candidates: list[Schedule] = []
    for schedule in (*(each.schedule for each in results), *named):
        if schedule not in candidates:
            candidates.append(schedule)
    ranked = sorted(_timed(values, way, device, number, each) for number, each in enumerate(candidates))
    best = ranked[0]
    rival = next((each for each in ranked if each.schedule.name != AUTO and each.excess <= best.excess), None)
    equation = _equation(best, rival, results, _within(values, device is not None))
    choice = Choice(best.schedule.name, (Derived("schedule", best.schedule.name, equation),), best.schedule)
    return Searched(choice, best.seconds)


def _timed(values: ConfigValues, way: Way, device: DeviceLimit | None, number: int, plain: Schedule) -> _Timed:
    proof = proved(values, plain)
    seconds = float(f"{_seconds(way, proof):.9g}")  # equal but for rounding
    return _Timed(sum(_over(way, device, proof.schedule)), seconds, number, plain)


def _over(way: Way, device: DeviceLimit | None, schedule: Schedule) -> list[int]:
    """Bytes that every rank holds over its device."""
    if device is None:
        return [0] * way.placement.pp
    return [max(0, cost.peak_bytes - device.available_bytes) for cost in way.rank_costs(schedule)]


def _seconds(way: Way, proof: Proof) -> float:
    """Of one call, as the plan predicts it."""
    trace = predicted(proof.plain if proof.wrong else proof.schedule, simulation_costs(way.costs, way.stages))
    return step_time(trace)


def _limits(values: ConfigValues, way: Way, task: Task, device: DeviceLimit | None) -> list[float]:
    """Bytes of activations that each rank may hold: what is asked for, else what its device leaves for them."""
    pp, asked = task.placement.pp, values[MEMORY]
    if asked is not None or device is None:
        return [(1.0 if asked is None else asked) * unit_of_memory(task.sizes, pp, task.num_microbatches)] * pp
    plain = next(named_schedules(task))
    limits = []
    for r, cost in enumerate(way.rank_costs(proved(values, plain).schedule)):
        passing = max(way.held[stage].passing for stage in task.placement.stages_of(r))
        limits.append(float(device.available_bytes - (cost.peak_bytes - cost.activation_bytes) - passing))
    return limits


def _within(values: ConfigValues, on_device: bool) -> str:
    asked = values[MEMORY]
    parts = [f"{MEMORY}={asked:g}"] if asked is not None else []
    parts += [LIMIT] if on_device else []
    return " and ".join(parts) or "the activations that 1F1B keeps on its first rank"


def _equation(best: _Timed, rival: _Timed | None, results: Sequence[Found], within: str) -> str:
    beside = "no named schedule fits" if rival is None else f"best named {rival.schedule.name} {rival.seconds:.4g} s"
    kind = "V" if best.schedule.placement.kind == "v" else "loop"
    what = "found" if best.schedule.name == AUTO else "as good as any that was found"
    return (
        f"schedule {best.schedule.name} {best.seconds:.4g} s a call, stages placed as a {kind}: {what} among "
        f"{sum(each.tried for each in results):,} orders within {within}; {beside}; no order takes less than "
        f"{results[0].bound:.4g} s"
    )
