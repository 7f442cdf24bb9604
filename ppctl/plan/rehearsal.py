"""Prepares a rehearsal (one rank of each kind, fewer microbatches) and applies its result to all ranks of the kind.

The result is compared with the plan as a value, as JSON and as a picture.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from ppctl.config.argv import LAYOUT
from ppctl.config.batch_sizes import at_size
from ppctl.config.schema import RunConfig
from ppctl.cost.activations import stage_activations
from ppctl.errors import ConfigError, Problem
from ppctl.geometry.layers import layer_kinds, recomputed_modules, recomputed_runs
from ppctl.plan.build import build_plan
from ppctl.plan.memory import held_bytes, setting_of
from ppctl.plan.memory_limit import amount, available_text
from ppctl.plan.plan import Plan
from ppctl.plan.plan_picture import picture
from ppctl.plan.split_options import WITHOUT
from ppctl.plan.types import RankCost, StageSpec
from ppctl.records.rehearsal_record import STEP, LayerKernels, Rehearsed, StageMemory
from ppctl.schedule.action import LIFE_ENDS, Action, F, Op, stages_with_backwards
from ppctl.schedule.picture import Picture, RankMemory
from ppctl.topology import RankGrid

_ROUNDS = (2, 3, 4, 5, 6, 8, 12, 16)
"""Microbatches of a rehearsal, in units of what the schedule does in one round of all pp_ranks."""


class RankKind(NamedTuple):
    """pp_ranks whose stages hold the same kinds of layers in the same order."""

    pp_ranks: tuple[int, ...]
    """The pp_ranks of the kind; the first is rehearsed, because its planned peak of memory is the highest."""
    ranks: tuple[int, ...]
    """All global ranks of these pp_ranks, the rehearsed one first."""


def kinds_of(config: RunConfig, plan: Plan) -> tuple[RankKind, ...]:
    """The kinds of ranks, by their lowest pp_rank. Ranks of one pp_rank hold the same sizes; the fullest come first."""
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
    """The run with fewer microbatches and the same peak of activations on each pp_rank; unchanged if none is found."""
    if plan.smaller:  # of a growing batch, the last size takes the most memory
        config, plan = at_size(config, config.train.global_batch_size), replace(plan, smaller=())
    round_of_ranks = config.parallel.microbatch_group_size_per_vp_stage or plan.sizes.pp
    if "pipeline.pp_batch_size" in plan.provenance and plan.provenance["pipeline.pp_batch_size"] != "default":
        return config, plan  # calls of a fixed size cannot be shortened
    whole = _fullest(config, plan)
    for rounds in _ROUNDS:
        count = rounds * round_of_ranks
        if count >= plan.num_microbatches:
            break
        shorter = deepcopy(config)
        shorter.train.global_batch_size = count * config.train.micro_batch_size * plan.sizes.dp
        for key, value in {**WITHOUT, LAYOUT: plan.layout}.items():
            shorter[key] = value
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
        max((most for index, most in replayed(row, planned) if index in steady(row)), default=0)
        for row in plan.schedule.actions
    ]


def steady(actions: Sequence[Action]) -> range:
    """The indexes of a rank's list from where all its stages have gradients to where the first gradients are summed."""
    first = {action.stage: index for index, action in reversed([*enumerate(actions)]) if action.op in LIFE_ENDS}
    sums = (index for index, action in enumerate(actions) if action.op is Op.REDUCE_GRAD)
    return range(max(first.values(), default=-1) + 1, next(sums, len(actions)))


def scaled(measured: Rehearsed, microbatches: int, of_all: int) -> Rehearsed:
    """A measurement over `microbatches`, scaled to a step with `of_all`; work outside the schedule counts once."""

    def times(during: str, count: int) -> int:
        return count if during == STEP else round(count * of_all / microbatches)

    def scaled(each: LayerKernels) -> LayerKernels:
        counted: dict[str, Any] = {name: times(each.during, getattr(each, name)) for name in each.COUNTED}
        return replace(each, passes=times(each.during, each.passes), **counted)

    return replace(
        measured,
        host_waits=tuple(replace(w, count=times(w.during, w.count)) for w in measured.host_waits),
        operations=tuple(
            replace(o, count=times(o.during, o.count), launches=times(o.during, o.launches))
            for o in measured.operations
        ),
        layers=tuple(map(scaled, measured.layers)),
        traffic=tuple(
            replace(t, count=times(t.during, t.count), bytes=times(t.during, t.bytes)) for t in measured.traffic
        ),
    )


def replayed(actions: Sequence[Action], stages: Mapping[int, StageMemory]) -> Iterator[tuple[int, int]]:
    """Yield (index, most bytes of activations while that action runs) for every forward, backward and sum of gradients
    in a list, from each stage's measured bytes. Memory of received messages is never freed: its maximum counts."""
    held = waiting = pool = 0
    trained = stages_with_backwards(actions)
    for index, action in enumerate(actions):
        if action.op is Op.REDUCE_GRAD:
            yield index, held + pool
        if action.op is not F and action.op not in LIFE_ENDS:
            continue
        memory = stages[action.stage]
        own = memory.kept - memory.received
        if action.op is F:
            waiting += memory.received
            pool = max(pool, waiting)
            yield index, held + pool + max(memory.in_forward, own)
            if action.stage in trained:
                held += own
            else:
                waiting -= memory.received
        else:
            yield index, held + pool + memory.in_backward
            held -= own
            waiting -= memory.received


UPDATE = "update"
"""The `peak_action` of a peak that is reached after the schedule, in the optimizer step."""


@dataclass(frozen=True, slots=True)
class RankPeak:
    """A pp_rank's peak in the whole step, as measured on a rank of its kind."""

    pp_rank: int
    base: int
    """Bytes that the rank holds beside activations while the schedule runs: state, buffers, messages."""
    peak_bytes: int
    """The peak, including libraries' workspaces, which are planned and not measured."""
    peak_action: str
    stages: Mapping[int, StageMemory]
    """Activation memory of each of the pp_rank's stages."""


def peaks_of(plan: Plan, short: Plan, kind: RankKind, measured: Rehearsed) -> list[RankPeak]:
    """The peaks of all pp_ranks of a kind in the whole step, from the measurement of one rank in the `short` step. Each
    list is replayed with the measured stages; outside activations, every rank holds as much as the rehearsed one."""
    chosen = short.for_rank(measured.rank).pp_rank
    by_stage = {memory.stage: memory for memory in measured.stages}
    # an action may have two moments; the later one, while it ran, stays
    most = {moment.index: moment.most for moment in measured.moments}
    place = plan.schedule.placement

    def stages_of(pp_rank: int) -> dict[int, StageMemory]:
        return {
            own: by_stage[other] for own, other in zip(place.stages_of(pp_rank), place.stages_of(chosen), strict=True)
        }

    def replay(of: Plan, pp_rank: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """The replayed steps of a list before the first sum of gradients, and those after it."""
        row = of.schedule.actions[pp_rank]
        steps = [*replayed(row, stages_of(pp_rank))]
        end = steady(row).stop
        return [step for step in steps if step[0] < end], [step for step in steps if step[0] >= end]

    def beside(steps: list[tuple[int, int]]) -> list[int]:
        """Bytes that the rehearsed rank held beside activations, step by step."""
        return [most[index] - activations for index, activations in steps if index in most] or [0]

    adding, summing = replay(short, chosen)
    before, behind = max(beside(adding)), beside(summing)
    peaks = []
    for pp_rank in kind.pp_ranks:
        adding, summing = replay(plan, pp_rank)
        held = [(before + own, index) for index, own in adding]
        held += [(behind[min(i, len(behind) - 1)] + own, index) for i, (index, own) in enumerate(summing)]
        peak, index = max(held, key=lambda each: each[0])
        action = str(plan.schedule.actions[pp_rank][index])
        if measured.in_update > peak:
            peak, action = measured.in_update, UPDATE
        workspaces = plan.pp_ranks[pp_rank].buffer_bytes
        peaks.append(RankPeak(pp_rank, before + workspaces, peak + workspaces, action, stages_of(pp_rank)))
    return peaks


_STATE = ("weight_bytes", "gradient_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class Rehearsal:
    """A plan, and the measurements of one rank of each kind."""

    config: RunConfig
    plan: Plan
    short: Plan
    """The plan that was rehearsed: the run's plan with fewer microbatches."""
    measured: tuple[tuple[RankKind, Rehearsed], ...]

    @property
    def microbatches(self) -> tuple[int, int]:
        """(microbatches rehearsed, microbatches in a step of the run)."""
        short, whole = (plan.num_microbatches * plan.gradient_accumulation_steps for plan in (self.short, self.plan))
        return short, whole

    @cached_property
    def ranks(self) -> tuple[Rehearsed, ...]:
        """The measurements, with the counts of a whole step."""
        return tuple(scaled(each, *self.microbatches) for _, each in self.measured)

    @cached_property
    def peaks(self) -> tuple[RankPeak, ...]:
        """Peaks of all pp_ranks of the rehearsed kinds, by pp_rank."""
        rows = [peak for kind, each in self.measured for peak in peaks_of(self.plan, self.short, kind, each)]
        return tuple(sorted(rows, key=lambda peak: peak.pp_rank))

    def cost_of(self, rank: int) -> RankCost:
        """The plan's cost of a global rank."""
        return self.plan.pp_ranks[self.plan.for_rank(rank).pp_rank]

    def peak_of(self, rank: int) -> RankPeak:
        """The peak of a global rank's pp_rank."""
        pp_rank = self.plan.for_rank(rank).pp_rank
        return next(peak for peak in self.peaks if peak.pp_rank == pp_rank)

    def planned_kept(self, stage: int) -> int:
        """The planned bytes that a microbatch keeps on a stage."""
        layers, size = self.plan.stages[stage].layers, self.config.train.micro_batch_size
        return held_bytes(self.config, stage, layers, self.plan.sizes, size)[1]

    @property
    def tight(self) -> bool:
        """Whether all measured peaks fit, but one leaves less than 5 % of the memory free."""
        limit = self.plan.limit
        return limit is not None and limit.is_tight(max(peak.peak_bytes for peak in self.peaks))

    def problems(self) -> Iterator[Problem]:
        """Yield a problem (PP-E801) if the measured memory does not fit."""
        limit, worst = self.plan.limit, max(self.peaks, key=lambda peak: peak.peak_bytes)
        if limit is None or worst.peak_bytes <= limit.available_bytes:
            return
        message = (
            f"pp_rank {worst.pp_rank} needs {amount(worst.peak_bytes)} at its peak in {worst.peak_action}, as "
            f"rehearsed, but {available_text(limit)}"
        )
        yield Problem("PP-E801", message, "train.recompute_granularity=full", "launch.device_memory")

    def report(self) -> dict[str, Any]:
        """The JSON that `--json` prints, without the problems."""
        limit = self.plan.limit
        rehearsed, microbatches = self.microbatches
        return {
            "ranks": [self._rank(kind, each) for (kind, _), each in zip(self.measured, self.ranks, strict=True)],
            "pp_ranks": [
                {
                    "pp_rank": peak.pp_rank,
                    "planned_peak_bytes": self.plan.pp_ranks[peak.pp_rank].peak_bytes,
                    "measured_peak_bytes": peak.peak_bytes,
                    "peak_action": peak.peak_action,
                }
                for peak in self.peaks
            ],
            "microbatches": microbatches,
            "microbatches_rehearsed": rehearsed,
            "limit_bytes": None if limit is None else limit.limit_bytes,
            "reserve_bytes": None if limit is None else limit.reserve_bytes,
            "tight": self.tight,
        }

    def _rank(self, kind: RankKind, measured: Rehearsed) -> dict[str, Any]:
        """The report of one rehearsed rank: planned sizes beside measured ones, in bytes."""
        cost, peak = self.cost_of(measured.rank), self.peak_of(measured.rank)
        kept = {memory.stage: memory.kept for memory in measured.stages}
        own = {name: getattr(cost, name) for name in (*_STATE, "peak_bytes")}
        state = {name: getattr(measured, name) for name in _STATE} | {"peak_bytes": peak.peak_bytes}
        return {
            "rank": measured.rank,
            "same_as": [rank for rank in kind.ranks if rank != measured.rank],
            "stages": list(kept),
            "planned": own | {"kept_bytes_per_microbatch": {stage: self.planned_kept(stage) for stage in kept}},
            "measured": state | {"kept_bytes_per_microbatch": kept},
            "peak_action": peak.peak_action,
            "host_waits": [asdict(wait) for wait in measured.host_waits],
            "operations": sum(each.count for each in measured.operations),
            "launches": sum(each.launches for each in measured.operations),
            "layers": [asdict(each) for each in measured.layers],
            "messages": [asdict(each) for each in measured.traffic],
            "seconds": round(measured.seconds, 3),
        }

    def picture(self) -> Picture:
        """The picture of the step with the memory of each rank, as planned and as measured."""
        by_rank = {peak.pp_rank: _memory(peak) for peak in self.peaks}
        drawn = picture(self.plan, self.config)
        return replace(drawn, measured=tuple(by_rank.get(cost.pp_rank) for cost in self.plan.pp_ranks))


def _memory(peak: RankPeak) -> RankMemory:
    return RankMemory(
        peak.base,
        {stage: memory.kept for stage, memory in peak.stages.items()},
        {stage: memory.in_forward for stage, memory in peak.stages.items()},
        {stage: memory.in_backward for stage, memory in peak.stages.items()},
        peak.peak_bytes if peak.peak_action == UPDATE else 0,
    )
