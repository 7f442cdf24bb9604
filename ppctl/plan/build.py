"""From a RunConfig to a Plan: derive the sizes, lay out the stages, make and prove the schedule, price it all.

Knows the order of the chapters. Must not know their rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppctl.config.checks import beyond_limits, check, is_size, within_limits
from ppctl.config.schema import RunConfig
from ppctl.cost import parameters
from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.geometry.moe_layer_freq import fitted_moe_layer_freq, moe_layer_pattern
from ppctl.plan.clock import timing
from ppctl.plan.cut import AUTO, Cut, check_recompute, check_search, derive_cut
from ppctl.plan.findings import Finding, Findings, Judge, told
from ppctl.plan.fit import memory_findings
from ppctl.plan.given import chunks_wanted, read_given, take_given
from ppctl.plan.memory import device_of, gathered, rank_costs
from ppctl.plan.plan import Plan
from ppctl.plan.prices import simulation_costs, stage_costs
from ppctl.plan.profile import Measured, origin, read_profile
from ppctl.plan.said import Said, typed
from ppctl.plan.sizes import Batch, World, beyond, check_stages, derive_batch, derive_world, divide_model
from ppctl.plan.stages import stage_specs, tie_groups
from ppctl.plan.timing import (
    CAPACITY,
    CSV,
    Choice,
    Proof,
    check_length,
    choose_schedule,
    compute_only,
    predicted,
    proved,
    settled,
)
from ppctl.plan.types import Derived, RankCost, StageCost, StageSpec
from ppctl.plan.warmup import check_warmup, decide_warmup
from ppctl.schedule.action import Schedule
from ppctl.schedule.trace import bubble_fraction
from ppctl.topology import ParallelSizes


def build_plan(
    config: RunConfig,
    provenance: Mapping[str, str] | None = None,
    *,
    title: str | None = None,
) -> Plan:
    """Everything that follows from `config`, checked and priced.

    `provenance` maps dotted keys to where their values came from; whether a value was given is read there. What is
    wrong but leaves a plan to look at (a schedule that would hang, memory that does not fit) is in `Plan.problems`.
    Raises ConfigError with all problems where sizes or layout allow no plan.
    """
    return plan_checked(config, provenance or {}, check(config, provenance or {}), title=title)


def plan_checked(
    config: RunConfig, provenance: Mapping[str, str], problems: Sequence[Problem], *, title: str | None = None
) -> Plan:
    """As `build_plan`, of a config that `config.checks` has looked at: `problems` are what it found, and come first."""
    beyond = list(beyond_limits(config))
    if any(is_size(key) for key in beyond):
        raise ConfigError(problems)  # they name these values; nothing can be derived from such
    said = Said(within_limits(config, beyond), provenance)
    derivation = derive(said)
    if derivation.findings or not derivation.complete:
        found = told(said, derivation.findings, _judge(said))
        raise ConfigError([*problems, *found])
    plan = _assemble(said, derivation, title or config.recipe or config.log.name)
    found = [*plan.problems, *told(said, memory_findings(said, lambda: plan.pp_ranks), _judge(said))]
    return replace(plan, problems=(*problems, *found))


@dataclass(slots=True)
class Derivation:
    """The chapters that do not need a schedule; what could not be derived is None, and `findings` say why."""

    findings: Findings
    world: World | None = None
    cut: Cut | None = None
    batch: Batch | None = None
    choice: Choice | None = None
    measured: Measured | None = None
    proof: Proof | None = None
    """Of the schedule that a search for the layout was made with."""

    @property
    def complete(self) -> bool:
        """Whether a plan can be made."""
        return None not in (self.world, self.cut, self.batch, self.choice)

    @property
    def derived(self) -> tuple[Derived, ...]:
        """All equations, in the order in which a reader wants them."""
        parts = (self.world, self.batch, self.cut, self.choice)
        return tuple(derived for part in parts if part is not None for derived in part.derived)


def derive(said: Said, *, search: bool = True) -> Derivation:
    """Sizes, layout, batch and the choice of schedule, with everything that is wrong.

    Without `search`, `layout=auto` stays the even split.
    """
    derivation = Derivation(beyond(said))
    findings = derivation.findings
    if not findings:
        check_stages(said, findings)
    if findings:
        return derivation
    findings.extend(_layer_kinds(said))
    derivation.world = derive_world(said, findings)
    divide_model(said, findings)
    derivation.measured = read_profile(said, findings)
    given = read_given(said, findings)
    derivation.cut = derive_cut(said, findings, chunks_wanted(said, given))
    if derivation.world is not None:
        derivation.batch = derive_batch(said, derivation.world.dp, findings)
    if derivation.cut is not None:
        check_recompute(said, said["pp"] * derivation.cut.vpp, findings)
        derivation.choice = _choice(said, derivation, given, findings)
        if derivation.batch is not None:
            check_length(said, said["pp"] * derivation.cut.vpp, derivation.batch.num_microbatches, findings)
        if derivation.choice is not None:
            check_warmup(said, derivation.choice, findings)
        if said["layout"] == AUTO:
            check_search(said, len(derivation.cut.layout.stages), findings)
    if search and said["layout"] == AUTO and derivation.complete and not findings:
        derivation.cut = _balanced(said, derivation)
    return derivation


def _balanced(said: Said, derivation: Derivation) -> Cut:
    world, cut, batch, choice = derivation.world, derivation.cut, derivation.batch, derivation.choice
    assert world and cut and batch and choice
    from ppctl.plan.auto import balanced_cut  # few plans search

    derivation.proof = proved(said, compute_only(said, choice, cut.vpp, batch.num_microbatches))
    return balanced_cut(said, cut, batch, derivation.proof.schedule, _sizes(said, world, cut), derivation.measured)


def _choice(said: Said, derivation: Derivation, given: Schedule | None, findings: Findings) -> Choice | None:
    if said[CSV] is None:
        return choose_schedule(said, derivation.cut.vpp if derivation.cut else 1, findings)
    return None if given is None else take_given(said, given, derivation.cut, derivation.batch, findings)


def _layer_kinds(said: Said) -> Iterable[Finding]:
    try:
        moe_layer_pattern(said.config.model)
    except ConfigError as error:
        for problem in error.problems:
            key = "model.moe_layer_freq"
            place = said.told(key, "model.num_layers")
            ways = (((key, fitted_moe_layer_freq(said.config.model)),), ((key, 1),))
            yield Finding(problem.code, key, problem.message, place, *ways)


def _compute_only(
    said: Said, derivation: Derivation, stages: Sequence[StageSpec], sizes: ParallelSizes
) -> tuple[Schedule, tuple[Derived, ...]]:
    """The schedule without messages, and what was decided on the way."""
    cut, batch, choice = derivation.cut, derivation.batch, derivation.choice
    assert cut and batch and choice

    def make(extra_warmup: int) -> Schedule:
        return compute_only(said, choice, cut.vpp, batch.num_microbatches, extra_warmup)

    def price(schedule: Schedule) -> Sequence[RankCost]:
        return rank_costs(said.config, stages, sizes, schedule, batch.micro_batch_size)

    costs = simulation_costs(_priced(said, derivation, stages, sizes), stages)
    extra, derived = decide_warmup(said, choice, costs, make, price)
    return make(extra), derived


def _priced(
    said: Said, derivation: Derivation, stages: Sequence[StageSpec], sizes: ParallelSizes
) -> Sequence[StageCost]:
    assert derivation.batch
    layers, size = [stage.layers for stage in stages], derivation.batch.micro_batch_size
    return stage_costs(said.config, layers, sizes, size, derivation.measured)


def _sizes(said: Said, world: World, cut: Cut) -> ParallelSizes:
    return ParallelSizes(
        world.world, said["pp"], cut.vpp, said["tp"], said["cp"], world.dp, world.ep, world.etp, world.edp
    )


def _assemble(said: Said, derivation: Derivation, name: str) -> Plan:
    world, cut, batch, choice = derivation.world, derivation.cut, derivation.batch, derivation.choice
    assert world and cut and batch and choice
    config, model = said.config, said.config.model
    sizes = _sizes(said, world, cut)
    stages = stage_specs(config, cut.layout, batch.micro_batch_size, choice.placement)
    plain, decided = _compute_only(said, derivation, stages, sizes)
    proof = derivation.proof
    if proof is None or proof.plain != plain:
        proof = proved(said, plain)
    schedule, wrong = proof.schedule, proof.wrong
    costs = _priced(said, derivation, stages, sizes)
    run = plain if wrong else schedule
    trace = predicted(run, simulation_costs(costs, stages))
    ranks = rank_costs(config, stages, sizes, schedule, batch.micro_batch_size)
    measured = derivation.measured
    priced_by = device_of(config).title if measured is None else measured.path
    times = timing(config, stages, sizes, run, trace, costs, ranks, batch.accumulation, priced_by)
    return Plan(
        name=name,
        sizes=sizes,
        layout=cut.layout.canonical(),
        stages=stages,
        pp_ranks=ranks,
        schedule=schedule,
        num_microbatches=batch.num_microbatches,
        bubble_fraction=bubble_fraction(trace),
        step_time_s=times.pipeline_s * batch.accumulation + times.optimizer_s,
        time_calibrated=measured is not None,
        timing=times,
        params_total=parameters.total_parameters(model),
        params_mtp=parameters.mtp_parameters(model),
        params_active=parameters.active_parameters(model),
        params_hf=parameters.hugging_face_parameters(model),
        gradient_accumulation_steps=batch.accumulation,
        tie_groups=tie_groups(model, stages),
        p2p_capacity=said[CAPACITY],
        derived=(
            *derivation.derived,
            *decided,
            *gathered(config, sizes, ranks),
            *origin(measured, cut.layout.canonical()),
        ),
        provenance=dict(said.provenance),
        problems=tuple(wrong),
    )


def _judge(said: Said) -> Judge:
    """The judge of remedies: what is wrong with something else, but for what the rules on values find here already."""
    known = {finding.rule for finding in _checked(said)}
    return lambda other: [finding for finding in _judged(other) if finding.rule not in known]


def _judged(said: Said) -> Findings:
    """What is wrong with something else that might be said: with its values and sizes, or else with its memory."""
    # A search takes seconds, and where the even split fits, it finds a layout that fits.
    found, derivation = _checked(said), derive(said, search=False)
    if derivation.findings or not derivation.complete:
        return [*found, *derivation.findings]
    try:
        return [*found, *memory_findings(said, lambda: _held(said, derivation))]
    except ScheduleError as error:  # a policy that has no order for these sizes
        return [Finding(problem.code, "schedule", problem.message, problem.place) for problem in error.problems]


def _checked(said: Said) -> Findings:
    """What the rules on values find: a remedy must break none of them either."""
    return [
        Finding(problem.code, problem.message, problem.message, problem.place, *filter(None, [typed(problem.remedy)]))
        for problem in check(said.config, said.provenance)
    ]


def _held(said: Said, derivation: Derivation) -> Sequence[RankCost]:
    """What the pp_ranks hold, receives that are posted ahead included, without timing anything."""
    world, cut, batch, choice = derivation.world, derivation.cut, derivation.batch, derivation.choice
    assert world and cut and batch and choice
    few = replace(batch, num_microbatches=settled(said, choice, batch.num_microbatches))
    derivation = replace(derivation, batch=few)
    sizes, size = _sizes(said, world, cut), batch.micro_batch_size
    stages = stage_specs(said.config, cut.layout, size, choice.placement)
    plain, _ = _compute_only(said, derivation, stages, sizes)
    schedule = proved(said, plain).schedule
    return rank_costs(said.config, stages, sizes, schedule, size)
