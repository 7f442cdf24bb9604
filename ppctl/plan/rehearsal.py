"""Prepares a rehearsal (one rank of each kind, fewer microbatches) and applies its result to all ranks of the kind.

Knows plans and what was measured of a rank. Must not know how it was measured, processes or texts.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import NamedTuple

from ppctl.config.batch_sizes import at_size
from ppctl.config.schema import RunConfig
from ppctl.cost.activations import stage_activations
from ppctl.errors import ConfigError
from ppctl.geometry.layers import layer_kinds, recomputed_modules, recomputed_runs
from ppctl.plan.build import build_plan
from ppctl.plan.memory import setting_of
from ppctl.plan.plan import Plan
from ppctl.plan.types import StageSpec
from ppctl.records.rehearsal_record import STEP, Rehearsed, StageMemory
from ppctl.schedule.action import LIFE_ENDS, Action, F, Op, stages_with_backwards
from ppctl.topology import RankGrid

_ROUNDS = (2, 3, 4, 5, 6, 8, 12, 16)
"""Microbatches of a rehearsal, in units of what the schedule does in one round of all pp_ranks."""


class RankKind(NamedTuple):
    """pp_ranks whose stages hold the same kinds of layers in the same order."""

    pp_ranks: tuple[int, ...]
    """The first of them is rehearsed: it has the most microbatches in flight."""
    ranks: tuple[int, ...]
    """All global ranks of these pp_ranks, the rehearsed one first."""


def kinds_of(config: RunConfig, plan: Plan) -> tuple[RankKind, ...]:
    """The kinds of ranks, in the order of their first pp_rank. Ranks of one pp_rank hold the same sizes."""
    alike: dict[Hashable, list[int]] = {}
    for cost in plan.pp_ranks:
        own = [stage for stage in plan.stages if stage.pp_rank == cost.pp_rank]
        alike.setdefault(tuple(_kind_of_stage(config, stage) for stage in own), []).append(cost.pp_rank)
    of_pp_rank: list[list[int]] = [[] for _ in plan.pp_ranks]
    grid = RankGrid(plan.sizes)
    for pipeline in grid.groups("pp"):
        for pp_rank, rank in enumerate(pipeline):
            of_pp_rank[pp_rank].append(rank)
    kinds = []
    for members in alike.values():
        members.sort(key=lambda pp_rank: -plan.pp_ranks[pp_rank].peak_bytes)
        kinds.append(RankKind(tuple(members), tuple(rank for each in members for rank in sorted(of_pp_rank[each]))))
    return tuple(sorted(kinds, key=lambda kind: min(kind.pp_ranks)))


def _kind_of_stage(config: RunConfig, stage: StageSpec) -> Hashable:
    layers, train = list(stage.layers), config.train
    runs = tuple(tuple(map(layers.index, run)) for run in recomputed_runs(train, stage.stage, layers))
    return (
        tuple(layer_kinds(config.model, layers)),
        runs,
        recomputed_modules(train, stage.stage),
        stage.params,
        stage.receives,
        stage.sends,
    )


def shortened(config: RunConfig, plan: Plan) -> tuple[RunConfig, Plan]:
    """The run with fewer microbatches and the same peak of activations per pp_rank; unchanged if none is found."""
    if plan.smaller:  # the whole batch fills a device most
        config, plan = at_size(config, config.train.global_batch_size), replace(plan, smaller=())
    round_of_ranks = config.parallel.microbatch_group_size_per_vp_stage or plan.sizes.pp
    if "pipeline.pp_batch_size" in plan.provenance and plan.provenance["pipeline.pp_batch_size"] != "default":
        return config, plan  # its calls have a size of their own
    whole = _fullest(config, plan)
    for rounds in _ROUNDS:
        count = rounds * round_of_ranks
        if count >= plan.num_microbatches:
            break
        shorter = deepcopy(config)
        shorter.train.global_batch_size = count * config.train.micro_batch_size * plan.sizes.dp
        shorter.parallel.pipeline_model_parallel_layout = plan.layout
        try:
            made = build_plan(shorter, plan.provenance)
        except ConfigError:
            continue
        if made.num_microbatches == count and _fullest(shorter, made) == whole:
            return shorter, made
    return config, plan


def _fullest(config: RunConfig, plan: Plan) -> list[int]:
    """The peak bytes of activations on each pp_rank, over the actions that `steady` selects."""
    setting = setting_of(config, plan.sizes, config.train.micro_batch_size)
    planned = {}
    for spec in plan.stages:
        alive = stage_activations(config.model, spec.layers, setting, spec.stage)
        planned[spec.stage] = StageMemory(spec.stage, alive.kept, alive.in_forward, alive.in_backward)
    return [
        max((step.most for step in replayed(row, planned) if step.index in steady(row)), default=0)
        for row in plan.schedule.actions
    ]


def steady(actions: Sequence[Action]) -> range:
    """The indexes of a rank's list from where all of its stages have gradients to where the first ones are summed."""
    first = {action.stage: index for index, action in reversed([*enumerate(actions)]) if action.op in LIFE_ENDS}
    sums = (index for index, action in enumerate(actions) if action.op is Op.REDUCE_GRAD)
    return range(max(first.values(), default=-1) + 1, next(sums, len(actions)))


def scaled(measured: Rehearsed, microbatches: int, of_all: int) -> Rehearsed:
    """A measurement over some `microbatches`, scaled to a step `of_all`: what surrounds the schedule happens once."""

    def times(during: str, count: int) -> int:
        return count if during == STEP else round(count * of_all / microbatches)

    return replace(
        measured,
        host_waits=tuple(replace(w, count=times(w.during, w.count)) for w in measured.host_waits),
        operations=tuple(
            replace(o, count=times(o.during, o.count), launches=times(o.during, o.launches))
            for o in measured.operations
        ),
        layers=tuple(
            replace(
                each,
                passes=times(each.during, each.passes),
                kernels=times(each.during, each.kernels),
                others=times(each.during, each.others),
                other_bytes=times(each.during, each.other_bytes),
                host_waits=times(each.during, each.host_waits),
            )
            for each in measured.layers
        ),
        traffic=tuple(
            replace(t, count=times(t.during, t.count), bytes=times(t.during, t.bytes)) for t in measured.traffic
        ),
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A forward, a backward or a sum in a replay, and the most bytes of activations while it runs."""

    index: int
    """Index of its action in the list."""
    most: int
    """Peak bytes of activations while the action runs."""


def replayed(actions: Sequence[Action], stages: Mapping[int, StageMemory]) -> Iterator[Step]:
    """The activations of a list of actions, each stage holding what was measured of it. Starts from 0 bytes.

    The memory of received messages is used again, and never given back: it counts as much as there ever was at once.
    """
    held = waiting = pool = 0
    trained = stages_with_backwards(actions)
    for index, action in enumerate(actions):
        if action.op is Op.REDUCE_GRAD:
            yield Step(index, held + pool)
        if action.op is not F and action.op not in LIFE_ENDS:
            continue
        memory = stages[action.stage]
        own = memory.kept - memory.received
        if action.op is F:
            waiting += memory.received
            pool = max(pool, waiting)
            yield Step(index, held + pool + max(memory.in_forward, own))
            if action.stage in trained:
                held += own
            else:
                waiting -= memory.received
        else:
            yield Step(index, held + pool + memory.in_backward)
            held -= own
            waiting -= memory.received


UPDATE = "update"
"""The `peak_action` of a peak that is reached after the schedule, in the optimizer step."""


@dataclass(frozen=True, slots=True)
class RankPeak:
    """A pp_rank's peak in the whole step, as measured of a rank of its kind."""

    pp_rank: int
    base: int
    """What it holds beside activations while the schedule runs: state, buffers, messages."""
    peak_bytes: int
    """Libraries' workspaces included, which are planned and not measured."""
    peak_action: str
    stages: Mapping[int, StageMemory]
    """Activation memory of each of the pp_rank's stages."""


def peaks_of(plan: Plan, short: Plan, kind: RankKind, measured: Rehearsed) -> list[RankPeak]:
    """The peaks of all pp_ranks of a kind in the whole step, from what was measured of one over the `short` one.

    Each list is replayed with the stages as they were measured. What the rehearsed rank held beside activations, while
    gradients add up and while they are summed, is what every rank of its kind holds.
    """
    chosen = short.for_rank(measured.rank).pp_rank
    by_stage = {memory.stage: memory for memory in measured.stages}
    most = {moment.index: moment.most for moment in measured.moments}  # the later of an action's two: while it ran
    place = plan.schedule.placement

    def stages_of(pp_rank: int) -> dict[int, StageMemory]:
        return {
            own: by_stage[other] for own, other in zip(place.stages_of(pp_rank), place.stages_of(chosen), strict=True)
        }

    def replay(of: Plan, pp_rank: int) -> tuple[list[Step], list[Step]]:
        """The steps before the first sum, and those behind it."""
        row = of.schedule.actions[pp_rank]
        steps = [*replayed(row, stages_of(pp_rank))]
        end = steady(row).stop
        return [step for step in steps if step.index < end], [step for step in steps if step.index >= end]

    def beside(steps: list[Step]) -> list[int]:
        """Bytes that the rehearsed rank held beside activations, step by step."""
        return [most[step.index] - step.most for step in steps if step.index in most] or [0]

    adding, summing = replay(short, chosen)
    before, behind = max(beside(adding)), beside(summing)
    peaks = []
    for pp_rank in kind.pp_ranks:
        adding, summing = replay(plan, pp_rank)
        held = [(before + step.most, step.index) for step in adding]
        held += [(behind[min(i, len(behind) - 1)] + step.most, step.index) for i, step in enumerate(summing)]
        peak, index = max(held, key=lambda each: each[0])
        action = str(plan.schedule.actions[pp_rank][index])
        if measured.in_update > peak:
            peak, action = measured.in_update, UPDATE
        workspaces = plan.pp_ranks[pp_rank].buffer_bytes
        peaks.append(RankPeak(pp_rank, before + workspaces, peak + workspaces, action, stages_of(pp_rank)))
    return peaks
