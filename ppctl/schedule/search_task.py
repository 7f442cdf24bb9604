"""The task of a search for a schedule: stages at their places, their costs and sizes, and the ranks' limits of memory.

Knows the least that any schedule holds, and the named schedules that a search has to beat. Must not know how a search
goes (`search`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ppctl.errors import Problem, ScheduleError
from ppctl.schedule.action import Action, B, F, Placement, Schedule
from ppctl.schedule.lane_orders import ROUNDING, Lanes, rows_of
from ppctl.schedule.policies import AUTO, POLICIES, make_schedule
from ppctl.schedule.simulate import Costs


@dataclass(frozen=True, slots=True)
class Task:
    """The stages, costs and limits for which a schedule is searched."""

    placement: Placement
    num_microbatches: int
    costs: Costs
    sizes: Sequence[float]
    """What one microbatch holds on each stage from its F to its I, in any unit."""
    limits: Sequence[float]
    """What each pp_rank may hold of that at once."""
    group: int | None = None
    """`microbatch_group_size` of the named schedules."""
    deferred: Sequence[float] | None = None
    """What it holds from its I to its W. None: as much as before, activations count whole until their W."""


def placements(pp: int, vpp: int) -> list[Placement]:
    """The possible placements: a loop, and a V for two chunks per rank."""
    return [Placement(kind, pp, pp * vpp) for kind in ("loop", "v") if kind == "loop" or vpp == 2]


def unit_of_memory(sizes: Sequence[float], pp: int, num_microbatches: int) -> float:
    """The memory of 1F1B's first rank: min(pp, num_microbatches) microbatches on the first pp-th of the stages."""
    return min(pp, num_microbatches) * sum(sizes[: len(sizes) // pp])


def least_limits(placement: Placement, sizes: Sequence[float], deferred: Sequence[float] | None = None) -> list[float]:
    """The least limit of every pp_rank: one microbatch on all of its stages, and what an I adds for its W.

    Where that is nothing, every schedule needs as much: while a rank's last stage computes, the microbatch is on all.
    """
    later = sizes if deferred is None else deferred
    stages_of = [placement.stages_of(r) for r in range(placement.pp)]
    return [sum(sizes[s] for s in own) + max(0.0, *(later[s] - sizes[s] for s in own)) for own in stages_of]


def named_schedules(task: Task) -> Iterator[Schedule]:
    """Every schedule with a name that runs on this placement."""
    place = task.placement
    vpp = place.num_stages // place.pp
    for name, policy in POLICIES.items():
        if not policy.trains or policy.placement != place.kind or not policy.runs(vpp):
            continue
        try:
            yield make_schedule(
                name,
                pp=place.pp,
                vpp=vpp,
                num_microbatches=task.num_microbatches,
                microbatch_group_size=task.group,
            )
        except ScheduleError:
            continue  # not made for so few microbatches, or for this size of groups


def one_by_one(placement: Placement, num_microbatches: int) -> Schedule:
    """One microbatch through all stages and back after another: no rank ever holds more than its part of one."""
    rows = []
    for r in range(placement.pp):
        own = placement.stages_of(r)
        order = [*((F, stage) for stage in own), *((B, stage) for stage in reversed(own))]
        rows.append(tuple(Action(op, stage, mb) for mb in range(num_microbatches) for op, stage in order))
    return Schedule(AUTO, placement, num_microbatches, tuple(rows))


def shortest(task: Task) -> float:
    """Seconds of a step that no order undercuts."""
    return lanes_of(task).bound()


def held_by(task: Task, schedule: Schedule) -> list[float]:
    """The peak of every pp_rank under a schedule whose microbatches run in order, in the task's unit."""
    rows = rows_of(schedule)
    assert rows is not None
    return lanes_of(task).peaks(rows)


def lanes_of(task: Task) -> Lanes:
    """The task in the form that orders are tried in."""
    return Lanes.of(task.placement, task.num_microbatches, task.costs, task.sizes, task.limits, task.deferred)


def check_limits(task: Task) -> None:
    """Raise ScheduleError (PP-E321) where a limit has no room for one microbatch on all stages of its rank."""
    least = least_limits(task.placement, task.sizes, task.deferred)
    short = [r for r, (need, limit) in enumerate(zip(least, task.limits, strict=True)) if need > limit * (1 + ROUNDING)]
    if short:
        rank = max(short, key=lambda r: least[r] / task.limits[r] if task.limits[r] > 0 else least[r] + 1e300)
        message = (
            f"pp_rank {rank} may hold {task.limits[rank]:.4g} of activations, and one microbatch on its stages "
            f"takes {least[rank]:.4g}: no schedule needs less"
        )
        raise ScheduleError(Problem("PP-E321", message))
