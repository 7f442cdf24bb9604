"""The schedule of a `TorchSchedule`: from what all ranks ask for, or from the times of a measured step.

Knows requests for schedules, and where ranks have their stages. Must not know torch's stages, or how ranks tell each
other what they ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ppctl.errors import ConfigError, Problem
from ppctl.modules.rank_agreement import CODE
from ppctl.schedule.action import BACKWARDS, Placement, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import AUTO, POLICIES, fitting_policy
from ppctl.schedule.schedule_request import ScheduleRequest
from ppctl.schedule.simulate import Costs

LOOPED_BFS = "loopedbfs"
"""Torch's name for `gpipe` with several chunks, whose backwards begin with the last microbatch: sums in that order."""


class Asked(NamedTuple):
    """What one rank asks for. All ranks must ask for the same, but for `stages`, which are its own."""

    schedule: str
    num_microbatches: int
    num_stages: int
    stages: list[int]
    replicated: bool
    """Whether one of the stages is wrapped in DistributedDataParallel."""


def schedule_of(request: ScheduleRequest, batched: bool, asked: list[Asked]) -> Schedule:
    """The schedule of a training step; of a search, the schedule under which stages are measured.

    Raises ScheduleError for a request that does not fit, ConfigError (PP-E130) if the ranks do not fit each other.
    """
    first, pp = asked[0], len(asked)
    for rank, other in enumerate(asked):
        if other[:3] != first[:3]:
            message = f"ranks ask for different schedules: rank 0 {first[:3]}, rank {rank} {other[:3]}"
            raise misuse(message, "the same schedule, memory, microbatches and number of stages on every rank")
    places = [Placement(kind, pp, first.num_stages) for kind in request.kinds]
    own = [sorted(each.stages) for each in asked]
    place = next((p for p in places if [list(p.stages_of(r)) for r in range(pp)] == own), None)
    if place is None:
        request.check(pp, first.num_stages // pp)
        there = "; ".join(f"rank {rank} {each.stages}" for rank, each in enumerate(asked))
        wanted = "; ".join(f"rank {rank} {list(places[0].stages_of(rank))}" for rank in range(pp))
        raise misuse(f"the stages are {there}, and {first.schedule} runs {wanted}", f"stages: {wanted}")
    runs = ScheduleRequest(_to_measure(place)) if request.policy == AUTO else request
    made = runs.made(place, first.num_microbatches)
    if first.schedule == LOOPED_BFS:
        made = _last_first(made)
    if made.split and any(each.replicated for each in asked):
        message = f"{first.schedule} splits backwards, and DistributedDataParallel takes a whole one for its last"
        raise misuse(message, f"schedule={fitting_policy(len(first.stages))!r}, or fully_shard")
    return lower(made, batched=batched)


def _last_first(schedule: Schedule) -> Schedule:
    """The schedule with the microbatches of backwards in reverse: the last microbatch's in place of the first's, and so
    on."""
    last = schedule.num_microbatches - 1
    turned = (tuple(a._replace(mb=last - a.mb) if a.op in BACKWARDS else a for a in row) for row in schedule.actions)
    return replace(schedule, actions=tuple(turned))


def _to_measure(place: Placement) -> str:
    """The policy under which stages are measured: it splits backwards, on this placement."""
    vpp = place.num_stages // place.pp
    return next(p.name for p in POLICIES.values() if p.splits and p.placement == place.kind and p.runs(vpp))


def found_schedule(schedule: Schedule, memory: float, measured: Sequence[Sequence[tuple[str, int, float]]]) -> Schedule:
    """The order that a search finds for measured seconds; a microbatch counts alike on all stages."""
    place, times = schedule.placement, {(op, stage): each for rank in measured for op, stage, each in rank}
    forward, inputs, weights = ([times.get((op, s), 0.0) for s in range(place.num_stages)] for op in "FIW")
    costs = Costs(forward, [i + w for i, w in zip(inputs, weights, strict=True)], inputs, weights)
    found = ScheduleRequest(AUTO, memory=memory, costs=costs).made(place, schedule.num_microbatches)
    return lower(found, batched=schedule.batched)


def misuse(message: str, remedy: str) -> ConfigError:
    """The error of stages or arguments that cannot be followed (PP-E130)."""
    return ConfigError(Problem(CODE, message, remedy))
