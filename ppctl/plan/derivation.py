"""Derives the parts of a plan from a config, in their order: sizes, layout, batch and choice of schedule."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from ppctl.config.moe_layer_freq import fitted_moe_layer_freq, moe_layer_pattern
from ppctl.errors import ConfigError
from ppctl.plan import schedule_choice
from ppctl.plan.layout_choice import AUTO, LayoutCut, check_offloading, check_recompute, check_search, derive_cut
from ppctl.plan.memory import RankPricer, held_bytes, rank_pricer
from ppctl.plan.plan import Plan
from ppctl.plan.prices import simulation_costs, stage_costs
from ppctl.plan.profile import Profile, read_profile
from ppctl.plan.rampup import GrowingBatch, check_sizes, derive_sizes, in_words
from ppctl.plan.schedule_choice import CSV, Choice, ProvedSchedule
from ppctl.plan.schedule_file import choose_file, chunks_wanted, read_schedule_file
from ppctl.plan.schedule_search import Way, check_memory, kept_choice, search_schedule, timed, with_rival
from ppctl.plan.sizes import (
    BatchSplit,
    check_stages,
    derive_batch,
    derive_world,
    divide_model,
)
from ppctl.plan.stages import frozen_stages, stage_specs
from ppctl.plan.types import Derived, StageCost, StageSpec
from ppctl.plan.violations import ConfigValues, Violation, Violations
from ppctl.schedule.action import Placement, Schedule
from ppctl.schedule.lane_orders import Task, named_schedules, placements
from ppctl.topology import ParallelSizes


@dataclass(frozen=True)
class Derivation:
    """Values that follow from a config before its schedule is made, and the costs of its stages and ranks."""

    values: ConfigValues
    world: ParallelSizes
    """How each axis divides the world, as if each rank had one chunk: only the layout gives the number of chunks."""
    equations: tuple[Derived, ...]
    """The equations of the world."""
    batch: BatchSplit
    cut: LayoutCut
    choice: Choice
    measured: Profile | None
    proof: ProvedSchedule | None = None
    """The verified schedule for which the layout was searched; None if no layout was searched."""

    @cached_property
    def sizes(self) -> ParallelSizes:
        """How each axis divides the world."""
        return replace(self.world, vpp=self.cut.vpp)

    @cached_property
    def stages(self) -> tuple[StageSpec, ...]:
        """The layers of every stage, and the tensors that it receives and sends."""
        return stage_specs(self.values.config, self.cut.layout, self.batch.micro_batch_size, self.choice.placement)

    @cached_property
    def frozen_stages(self) -> int:
        """The number of stages, counted from the first, that have no backward."""
        return frozen_stages(self.values.config.model, self.stages)

    @cached_property
    def costs(self) -> tuple[StageCost, ...]:
        """Seconds of one microbatch on every stage."""
        layers, size = [stage.layers for stage in self.stages], self.batch.micro_batch_size
        return stage_costs(self.values.config, layers, self.sizes, size, self.measured)

    @cached_property
    def smaller(self) -> tuple[GrowingBatch, ...]:
        """The ramp-up sizes of a batch that grows."""
        return derive_sizes(self.values, self.world.dp)

    @property
    def ways(self) -> list[Way]:
        """The placements of the stages that a search for a schedule may use, with the stages' costs."""
        config, size = self.values.config, self.batch.micro_batch_size

        def way(placement: Placement) -> Way:
            stages = stage_specs(config, self.cut.layout, size, placement.kind)
            priced = rank_pricer(config, stages, self.sizes, size)
            held = [held_bytes(config, each.stage, each.layers, self.sizes, size) for each in stages]
            return Way(placement, stages, self.costs, priced, held, self.frozen_stages)

        return list(map(way, placements(self.sizes.pp, self.cut.vpp)))

    @property
    def derived(self) -> tuple[Derived, ...]:
        """All equations, in the order in which a reader wants them."""
        of_batch = (*self.batch.derived, *in_words(self.values.config))
        return (*self.equations, *of_batch, *self.cut.derived, *self.choice.derived)

    @cached_property
    def rank_costs(self) -> RankPricer:
        """The function that computes the memory of every pp_rank under a given schedule."""
        return rank_pricer(self.values.config, self.stages, self.sizes, self.batch.micro_batch_size)

    def compute_only(self, num_microbatches: int) -> tuple[Schedule, tuple[Derived, ...]]:
        """The schedule without messages, and the equation of its warm-up if ppctl chose the warm-up."""

        def make(extra_warmup: int) -> Schedule:
            return schedule_choice.compute_only(self.values, self.choice, self.cut.vpp, num_microbatches, extra_warmup)

        extra, derived = schedule_choice.decide_warmup(
            self.values,
            self.sizes,
            self.choice,
            lambda: simulation_costs(self.costs, self.stages),
            lambda extra: schedule_choice.presumed(self.values, make(extra), self.frozen_stages),
            self.rank_costs,
        )
        return make(extra), derived


def derive(
    values: ConfigValues, violations: Violations, *, search: bool = True, before: Plan | None = None
) -> Derivation | None:
    """Sizes, layout, batch and the choice of schedule; None if one cannot be derived. Adds violations to `violations`.
    Without `search`, `layout=auto` stays the even split, and the schedule `auto` stays 1F1B. `before` is as in
    `plan_checked`."""
    if not violations:
        check_stages(values, violations)
    if violations:
        return None
    violations.extend(_layer_kinds(values))
    world, equations = derive_world(values, violations)
    divide_model(values, violations, 1 if world is None else world.etp)
    measured = read_profile(values, violations)
    schedule = read_schedule_file(values, violations)
    cut = derive_cut(values, violations, chunks_wanted(values, schedule))
    batch = derive_batch(values, world.dp, violations) if world is not None else None
    choice = _choice(values, schedule, cut, batch, violations) if cut is not None else None
    if world is not None and batch is not None and cut is not None and choice is not None:
        check_sizes(values, world.dp, batch, choice, len(cut.layout.stages), violations)
    if world is None or batch is None or cut is None or choice is None:
        return None
    derivation = Derivation(values, world, equations, batch, cut, choice, measured)
    if choice.searched and not violations:
        check_memory(values, derivation.costs, batch.num_microbatches, violations)
    return _searched(derivation, before) if search and not violations else derivation


def _choice(
    values: ConfigValues, schedule: Schedule | None, cut: LayoutCut, batch: BatchSplit | None, violations: Violations
) -> Choice | None:
    """The schedule chosen for these stages; adds all problems of the stages and the schedule to `violations`."""
    num_stages = values["pp"] * cut.vpp
    check_recompute(values, num_stages, violations)
    check_offloading(values, cut.layout.stages, violations)
    choice = None
    if values[CSV] is None:
        choice = schedule_choice.choose_schedule(values, cut.vpp, violations)
    elif schedule is not None:
        choice = choose_file(values, schedule, cut, batch, violations)
    if batch is not None:
        schedule_choice.check_length(values, num_stages, batch.num_microbatches, violations)
    if choice is not None:
        if batch is not None:
            schedule_choice.check_filled(values, choice, cut.vpp, batch, violations)
        schedule_choice.check_warmup(values, choice, violations)
        schedule_choice.check_compiled(values, choice, cut.vpp, violations)
        schedule_choice.check_overlap(values, choice, cut.vpp, violations)
    if values["layout"] == AUTO:
        check_search(values, len(cut.layout.stages), violations)
    return choice


def _searched(start: Derivation, before: Plan | None) -> Derivation:
    """The derivation with the results of a search, if the config asks for one."""
    if start.choice.searched:
        return _with_found_schedule(start, before)
    return _with_layout(start) if start.values["layout"] == AUTO else start


def _with_found_schedule(start: Derivation, before: Plan | None) -> Derivation:
    """The derivation with the best schedule in place of 1F1B and, if the layout is `auto` as well, with the best layout
    for that schedule."""
    count, sizes = start.batch.num_microbatches, start.sizes
    kept = kept_choice(before, start.cut.layout.canonical(), sizes, count)
    if kept is not None:
        return replace(start, choice=kept)
    if start.values["layout"] != AUTO:
        return replace(start, choice=search_schedule(start.values, sizes, start.ways, count)[0])
    rivals = list(_with_named_layouts(start))
    layouts = {rival.cut.layout.canonical(): replace(rival, choice=start.choice, proof=None) for rival in rivals}
    results = {
        text: search_schedule(each.values, sizes, each.ways, count, len(layouts)) for text, each in layouts.items()
    }
    best = min(results, key=lambda text: (results[text][0].least, results[text][1]))
    held = [timed(rival.values, rival.ways, rival.choice) for rival in rivals]
    fastest = min(range(len(held)), key=held.__getitem__)
    named = rivals[fastest].choice.name, rivals[fastest].cut.layout.canonical(), held[fastest]
    return replace(layouts[best], choice=with_rival(results[best][0], *named))


def _with_named_layouts(start: Derivation) -> Iterator[Derivation]:
    for way in start.ways:
        no_limit = [float("inf")] * way.placement.pp
        prices, kept = simulation_costs(way.costs, way.stages), [cost.activation_bytes for cost in way.costs]
        for schedule in named_schedules(Task(way.placement, start.batch.num_microbatches, prices, kept, no_limit)):
            yield _with_layout(replace(start, choice=Choice(schedule.name, (), schedule)))


def _with_layout(start: Derivation) -> Derivation:
    from ppctl.plan.auto_layout import balanced_cut  # few plans search

    values, batch = start.values, start.batch
    proof = schedule_choice.proved(
        values, schedule_choice.compute_only(values, start.choice, start.cut.vpp, batch.num_microbatches)
    )
    cut = balanced_cut(values, start.cut, batch, proof.schedule, start.sizes, start.measured)
    return replace(start, cut=cut, proof=proof)


def _layer_kinds(values: ConfigValues) -> Iterable[Violation]:
    try:
        moe_layer_pattern(values.config.model)
    except ConfigError as error:
        for problem in error.problems:
            key = "model.moe_layer_freq"
            place = values.cite(key, "model.num_layers")
            ways = ({key: fitted_moe_layer_freq(values.config.model)}, {key: 1})
            yield Violation(problem.code, key, problem.message, place, *ways)
