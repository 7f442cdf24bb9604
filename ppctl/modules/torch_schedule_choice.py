"""The schedule of a `TorchSchedule`: from what all ranks ask for, or from the times of a measured step.

Knows policies, files and the search. Must not know torch's stages, or how ranks tell each other what they ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from os import PathLike, fspath
from typing import NamedTuple

from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.modules.pipeline_parts import schedule_from_file
from ppctl.modules.rank_agreement import CODE
from ppctl.schedule.action import BACKWARDS, Placement, Schedule
from ppctl.schedule.lane_orders import Task, unit_of_memory
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import AUTO, POLICIES, fitting_policy, make_schedule, schedule_policy
from ppctl.schedule.search import find_schedule
from ppctl.schedule.simulate import Costs
from ppctl.schedule.verify import verify

LOOPED_BFS = "loopedbfs"
"""Torch's name for `gpipe` with several chunks, whose backwards begin with the last microbatch: sums in that order."""


class Asked(NamedTuple):
    """What one rank asks for. All ranks must ask for the same, but for `stages`, which are its own."""

    schedule: str
    memory: float
    num_microbatches: int
    num_stages: int
    stages: list[int]
    replicated: bool
    """Whether one of the stages is wrapped in DistributedDataParallel."""
    batched: bool
    """Whether messages travel in batches."""


def name_of(schedule: str | PathLike[str] | None, chunks: int) -> str:
    """The policy, AUTO, or the path of a file. Raises ConfigError (PP-E130) for a name that nobody knows."""
    if schedule is None:
        return fitting_policy(chunks)
    if isinstance(schedule, PathLike) or schedule.endswith(".csv"):
        return fspath(schedule)
    policy = schedule_policy(schedule)
    if schedule.lower().removeprefix("schedule") == LOOPED_BFS:
        return LOOPED_BFS
    if policy is None:
        known = ", ".join(name for name, each in POLICIES.items() if each.trains)
        raise misuse(f"schedule={schedule!r} is no schedule and no file *.csv", f"one of {known}, {AUTO}")
    return policy


def schedule_of(asked: list[Asked]) -> Schedule:
    """The schedule of a training step. Raises ConfigError (PP-E130) if ranks or stages do not fit it."""
    first, pp = asked[0], len(asked)
    for rank, other in enumerate(asked):
        if other[:4] != first[:4]:
            message = f"ranks ask for different schedules: rank 0 {first[:4]}, rank {rank} {other[:4]}"
            raise misuse(message, "the same schedule, memory, microbatches and stages on every rank")
    policy = POLICIES.get("gpipe" if first.schedule == LOOPED_BFS else first.schedule)
    given = None if policy is not None or first.schedule == AUTO else schedule_from_file(first.schedule)
    kinds = ("loop", "v") if given is None else (given.placement.kind,)
    places = [Placement(kind, pp, first.num_stages) for kind in (kinds if policy is None else (policy.placement,))]
    fits = (p for p in places if all(list(p.stages_of(r)) == sorted(each.stages) for r, each in enumerate(asked)))
    place = next(fits, None)
    if place is None:
        there = "; ".join(f"rank {rank} {each.stages}" for rank, each in enumerate(asked))
        wanted = "; ".join(f"rank {rank} {list(places[0].stages_of(rank))}" for rank in range(pp))
        raise misuse(f"the stages are {there}, and {first.schedule} runs {wanted}", f"stages: {wanted}")
    if given is None:
        made = _named(policy.name if policy is not None else _to_measure(place), place, first.num_microbatches)
        made = _last_first(made) if first.schedule == LOOPED_BFS else made
    else:
        made = given
    if (made.placement, made.num_microbatches) != (place, first.num_microbatches):
        message = f"{first.schedule} runs {made.placement.num_stages} stages and {made.num_microbatches} microbatches"
        remedy = f"n_microbatches={made.num_microbatches}"
        raise misuse(f"{message}, and there are {place.num_stages} and {first.num_microbatches}", remedy)
    if (made.split or first.schedule == AUTO) and any(each.replicated for each in asked):
        message = f"{first.schedule} splits backwards, and DistributedDataParallel takes a whole one for its last"
        raise misuse(message, f"schedule={fitting_policy(len(first.stages))!r}, or fully_shard")
    if problems := verify(made):
        raise ScheduleError(problems)
    return lower(made, batched=first.batched)


def _named(name: str, place: Placement, num_microbatches: int) -> Schedule:
    policy, vpp = POLICIES[name], place.num_stages // place.pp
    if not policy.runs(vpp):
        other = policy.for_more_chunks or next(each.name for each in POLICIES.values() if each.runs(vpp))
        raise misuse(f"{name} runs {policy.chunks_in_words}, and there are {vpp}", f"schedule={other!r}")
    return make_schedule(name, pp=place.pp, vpp=vpp, num_microbatches=num_microbatches)


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
    whole = [i + w for i, w in zip(inputs, weights, strict=True)]
    sizes = [1.0] * place.num_stages
    limits = [memory * unit_of_memory(sizes, place.pp, schedule.num_microbatches)] * place.pp
    costs = Costs(forward, whole, inputs, weights)
    found = find_schedule(Task(place, schedule.num_microbatches, costs, sizes, limits)).schedule
    return lower(found, batched=schedule.batched)


def misuse(message: str, remedy: str) -> ConfigError:
    """The error of stages or arguments that cannot be followed (PP-E130)."""
    return ConfigError(Problem(CODE, message, remedy))
