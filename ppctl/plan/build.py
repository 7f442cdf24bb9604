"""From a RunConfig to a Plan: derive the sizes, lay out the stages, make and prove the schedule, price it all.

Knows the order of the chapters. Must not know their rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ppctl.config.schema import RunConfig
from ppctl.cost import parameters
from ppctl.cost.layers import moe_layer_pattern
from ppctl.errors import ConfigError, Problem
from ppctl.plan.cut import Cut, derive_cut
from ppctl.plan.findings import Finding, Findings, told
from ppctl.plan.fit import memory_problems
from ppctl.plan.said import Said
from ppctl.plan.sizes import Batch, World, derive_batch, derive_world, divide_model, positive
from ppctl.plan.stages import rank_costs, stage_specs, tie_groups
from ppctl.plan.timing import Choice, choose_schedule, predicted
from ppctl.plan.types import Derived, Plan, StageSpec
from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule
from ppctl.schedule.trace import bubble_fraction, step_time
from ppctl.schedule.verify import verify
from ppctl.topology import ParallelSizes

GROUP = "parallel.microbatch_group_size_per_vp_stage"
CAPACITY = "pipeline.p2p_capacity"


def build_plan(
    config: RunConfig,
    provenance: Mapping[str, str] | None = None,
    *,
    title: str | None = None,
    problems: Sequence[Problem] = (),
) -> Plan:
    """Everything that follows from `config`, checked and priced.

    `provenance` maps dotted keys to where their values came from; whether a value was given is read there. `problems`
    are those that are known already (`config.checks`); they come first. What is wrong but leaves a plan to look at (a
    schedule that would hang, memory that does not fit) is in `Plan.problems`. Raises ConfigError with all problems
    where sizes or layout allow no plan.
    """
    said = Said(config, provenance or {})
    derivation = derive(said)
    if derivation.findings or not derivation.complete:
        raise ConfigError([*problems, *told(said, derivation.findings, lambda other: derive(other).findings)])
    found = list(problems)
    schedule = _schedule(said, derivation, found)
    plan = _assemble(said, derivation, schedule, title or config.recipe or config.log.name)
    found += memory_problems(said, plan.pp_ranks, _peak)
    return replace(plan, problems=tuple(found))


@dataclass(slots=True)
class Derivation:
    """The chapters that do not need a schedule; what could not be derived is None, and `findings` say why."""

    findings: Findings
    world: World | None = None
    cut: Cut | None = None
    batch: Batch | None = None
    choice: Choice | None = None

    @property
    def complete(self) -> bool:
        """Whether a plan can be made."""
        return None not in (self.world, self.cut, self.batch, self.choice)

    @property
    def derived(self) -> tuple[Derived, ...]:
        """All equations, in the order in which a reader wants them."""
        parts = (self.world, self.batch, self.cut, self.choice)
        return tuple(derived for part in parts if part is not None for derived in part.derived)


def derive(said: Said) -> Derivation:
    """Sizes, layout, batch and the choice of schedule, with everything that is wrong."""
    derivation = Derivation(list(positive(said)))
    findings = derivation.findings
    if findings:
        return derivation
    findings.extend(_layer_kinds(said))
    derivation.world = derive_world(said, findings)
    divide_model(said, findings)
    derivation.cut = derive_cut(said, findings)
    if derivation.world is not None:
        derivation.batch = derive_batch(said, derivation.world.dp, findings)
    if derivation.cut is not None:
        derivation.choice = choose_schedule(said, derivation.cut.vpp, findings)
    return derivation


def _layer_kinds(said: Said) -> Iterable[Finding]:
    try:
        moe_layer_pattern(said.config.model)
    except ConfigError as error:
        for problem in error.problems:
            key = "model.moe_layer_freq"
            place = said.told(key, "model.num_layers")
            every = f"[1]*{said['model.num_layers']}"
            yield Finding(problem.code, key, problem.message, place, ((key, every),), ((key, 1),))


def _schedule(said: Said, derivation: Derivation, problems: list[Problem]) -> Schedule:
    """The lowered schedule, proved. What the proof finds is added to `problems`."""
    plain = _compute_only(said, derivation)
    capacity = said[CAPACITY]
    schedule = lower(plain, capacity=capacity)
    wrong = verify(schedule)
    if wrong and capacity is not None:
        enough = max(lower(plain).capacities.values(), default=1)
        remedies = [f"{CAPACITY}={size}" for size in (enough, "null")]
        place = said.told(CAPACITY)
        wrong = [
            Problem(each.code, each.message, "\n".join(remedies), f"{each.place}\n{place}".strip()) for each in wrong
        ]
    problems += wrong
    return schedule


def _compute_only(said: Said, derivation: Derivation) -> Schedule:
    assert derivation.cut and derivation.batch and derivation.choice
    return make_schedule(
        derivation.choice.name,
        pp=said["pp"],
        vpp=derivation.cut.vpp,
        num_microbatches=derivation.batch.num_microbatches,
        microbatch_group_size=said[GROUP] if said.given(GROUP) else None,
    )


def _sizes(said: Said, world: World, cut: Cut) -> ParallelSizes:
    return ParallelSizes(
        world.world, said["pp"], cut.vpp, said["tp"], said["cp"], world.dp, world.ep, world.etp, world.edp
    )


def _assemble(said: Said, derivation: Derivation, schedule: Schedule, name: str) -> Plan:
    world, cut, batch, choice = derivation.world, derivation.cut, derivation.batch, derivation.choice
    assert world and cut and batch and choice
    config, model = said.config, said.config.model
    sizes = _sizes(said, world, cut)
    stages = stage_specs(config, cut.layout, batch.micro_batch_size)
    costs = rank_costs(config, stages, sizes, schedule, batch.micro_batch_size)
    bubble, seconds = _times(schedule, stages, sizes, config.launch.device)
    return Plan(
        name=name,
        sizes=sizes,
        layout=cut.layout.canonical(),
        stages=stages,
        pp_ranks=costs,
        schedule=schedule,
        num_microbatches=batch.num_microbatches,
        bubble_fraction=bubble,
        step_time_s=seconds,
        time_calibrated=False,
        params_total=parameters.total_parameters(model),
        params_mtp=parameters.mtp_parameters(model),
        params_active=parameters.active_parameters(model),
        params_hf=parameters.hugging_face_parameters(model),
        tie_groups=tie_groups(model, stages),
        p2p_capacity=said[CAPACITY],
        derived=derivation.derived,
        provenance=dict(said.provenance),
    )


def _times(schedule: Schedule, stages: Sequence[StageSpec], sizes: ParallelSizes, device: str) -> tuple[float, float]:
    trace = predicted(schedule, [stage.flops_forward for stage in stages], sizes.tp * sizes.cp, device)
    return bubble_fraction(trace), step_time(trace)


def _peak(said: Said) -> int | None:
    """The highest peak of any pp_rank in bytes, without proving anything; None where there is no plan."""
    derivation = derive(said)
    if derivation.findings or not (derivation.world and derivation.cut and derivation.batch and derivation.choice):
        return None
    sizes = _sizes(said, derivation.world, derivation.cut)
    stages = stage_specs(said.config, derivation.cut.layout, derivation.batch.micro_batch_size)
    schedule = _compute_only(said, derivation)
    costs = rank_costs(said.config, stages, sizes, schedule, derivation.batch.micro_batch_size)
    return max(cost.peak_bytes for cost in costs)
