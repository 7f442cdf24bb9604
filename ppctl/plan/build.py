"""From a RunConfig to a Plan: derives values, makes and proves the schedule, and prices everything.

Also has the lines of a plan on its stages: whose code runs, which stages have forwards alone, how messages travel, what
is offloaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from ppctl.config.batch_sizes import at_size
from ppctl.config.checks import beyond_limits, check, is_size, within_limits
from ppctl.config.parallel_rules import TRANSPORT, is_plain
from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.cost import parameter_counts
from ppctl.errors import ConfigError, Problem, ScheduleError
from ppctl.geometry.foreign_model import ForeignModel, foreign_of
from ppctl.geometry.layers import count_of, offloaded_layers
from ppctl.host.accelerators import MEGATRON, whose_prices
from ppctl.plan import prices
from ppctl.plan.derivation import Derivation, derive
from ppctl.plan.expert_dispatch import exchanged_again
from ppctl.plan.memory import checkpoint_copies, deferred, device_of, gathered, rank_pricer
from ppctl.plan.memory_limit import GIB, amount, device_limit, memory_violations
from ppctl.plan.plan import Plan
from ppctl.plan.profile import origin
from ppctl.plan.schedule_choice import CAPACITY, ProvedSchedule, presumed, proved, settled
from ppctl.plan.schedule_search import least_held
from ppctl.plan.sizes import beyond
from ppctl.plan.stages import tie_groups
from ppctl.plan.types import Derived, RankCost, SmallerBatch, StageCost, StageSpec
from ppctl.plan.violations import (
    ConfigValues,
    Judge,
    Rule,
    Violation,
    Violations,
    as_problems,
    parse_overrides,
)
from ppctl.schedule.action import Schedule
from ppctl.schedule.executor import Execution
from ppctl.schedule.simulate import Costs, attempted, bubble_of, computing, timed


def build_plan(config: RunConfig, provenance: Mapping[str, str] | None = None, *, title: str | None = None) -> Plan:
    """Everything that follows from `config`, checked and priced.

    `provenance` maps dotted keys to the sources of their values, which say whether the user set a value. Problems with
    which a plan is still possible (a schedule that would hang, memory that does not fit) are in `Plan.problems`. Raises
    ConfigError with all problems if sizes or layout allow no plan.
    """
    return plan_checked(config, provenance or {}, check(config, provenance or {}), title=title)


def plan_checked(
    config: RunConfig,
    provenance: Mapping[str, str],
    problems: Sequence[Problem],
    *,
    title: str | None = None,
    before: Plan | None = None,
) -> Plan:
    """`build_plan` for a config that `config.checks` has checked: its `problems` come first. If the plan `before` has
    the same pipeline, its schedule is taken in place of a search for one. Raises ConfigError as `build_plan` does."""
    outside = beyond_limits(config)
    if any(is_size(key) for key in outside):
        raise ConfigError(problems)  # nothing can be derived from the values that these problems name
    values = ConfigValues(within_limits(config) if outside else config, provenance)
    violations: Violations = []
    derivation = derive(values, violations, before=before)
    if violations or derivation is None:
        raise ConfigError([*problems, *as_problems(values, violations, _judge(values))])
    plan = _assemble(derivation, title or config.recipe or config.log.name)
    too_large = memory_violations(values, plan.sizes, lambda: plan.pp_ranks, derivation.choice.least)
    return replace(plan, problems=(*problems, *plan.problems, *as_problems(values, too_large, _judge(values))))


def plan_alone(values: ConfigValues) -> Plan | None:
    """The plan of checked values, also if it does not fit the device; None if sizes, layout or schedule allow none. For
    searches: it lacks remedies and the smaller sizes of a growing batch, either of which takes longer than the plan."""
    violations = beyond(values)
    try:
        derivation = derive(values, violations)
        return None if violations or derivation is None else _assemble(derivation, values.config.log.name, grows=False)
    except ScheduleError:  # the policy has no order for these sizes
        return None


def _assemble(derivation: Derivation, name: str, *, grows: bool = True) -> Plan:
    values, batch, cut, sizes = derivation.values, derivation.batch, derivation.cut, derivation.sizes
    config, model, stages, costs = values.config, values.config.model, derivation.stages, derivation.costs
    plain, decided = derivation.compute_only(batch.num_microbatches)
    proof = derivation.proof
    if proof is None or proof.plain != plain or derivation.frozen_stages:
        proof = proved(values, plain, derivation.frozen_stages, prices.simulation_costs(costs, stages))
    run, ran = _run(proof, prices.simulation_costs(costs, stages))
    smaller, of_sizes = _smaller(derivation, proof) if grows else ((), [])
    ranks = _fullest([derivation.rank_costs(proof.schedule), *(held for held, _ in of_sizes)])
    measured = derivation.measured
    of_megatron = " as Megatron-core runs it" * (config.cost.stack == MEGATRON)
    priced_by = device_of(config).title + of_megatron if measured is None else measured.path
    times, bubble = prices.step_timing(config, stages, sizes, run, ran, costs, ranks, batch.accumulation, priced_by)
    return Plan(
        name=name,
        sizes=sizes,
        layout=cut.layout.canonical(),
        stages=stages,
        pp_ranks=ranks,
        schedule=proof.schedule,
        num_microbatches=batch.num_microbatches,
        bubble_fraction=bubble,
        step_time_s=times.pipeline_s * batch.accumulation + times.optimizer_s,
        time_calibrated=measured is not None,
        timing=times,
        params_total=parameter_counts.total_parameters(model),
        params_mtp=parameter_counts.mtp_parameters(model),
        params_active=parameter_counts.active_parameters(model),
        params_hf=parameter_counts.hugging_face_parameters(model),
        gradient_accumulation_steps=batch.accumulation,
        tie_groups=tie_groups(model, stages),
        p2p_capacity=values[CAPACITY],
        traffic=prices.step_traffic(config, stages, sizes, proof.schedule, batch.micro_batch_size, batch.accumulation),
        limit=device_limit(config, sizes),
        smaller=smaller,
        derived=(*derivation.derived, *whose_code(model), *decided, *_in_words(derivation, proof, ranks)),
        provenance=dict(values.provenance),
        problems=tuple(dict.fromkeys([*proof.wrong, *(problem for _, wrong in of_sizes for problem in wrong)])),
    )


def _in_words(derivation: Derivation, proof: ProvedSchedule, ranks: Sequence[RankCost]) -> Iterator[Derived]:
    """The lines of a plan on what its stages do and hold under the schedule."""
    config, sizes, stages = derivation.values.config, derivation.sizes, derivation.stages
    micro_batch_size, run = derivation.batch.micro_batch_size, proof.plain if proof.wrong else proof.schedule
    yield from gathered(config, sizes, ranks)
    yield from prices.matrix_owners(config, stages, sizes)
    yield from offloaded(config, stages, derivation.costs, ranks)
    yield from exchanged_again(config, sizes, lambda other: rank_pricer(other, stages, sizes, micro_batch_size)(run))
    yield from checkpoint_copies(config, stages, sizes)
    yield from forwards_only(derivation.frozen_stages)
    yield from transport(config, sizes.pp, len(proof.plain.pairs))
    yield from deferred(config, stages, sizes, proof.schedule, micro_batch_size)
    yield from origin(derivation.measured, derivation.cut.layout.canonical()) or whose_seconds(config)


_OfSize = tuple[tuple[RankCost, ...], list[Problem]]
"""Costs of the pp_ranks at one size of the batch, and the problems of its schedule."""


def _smaller(derivation: Derivation, full: ProvedSchedule) -> tuple[tuple[SmallerBatch, ...], list[_OfSize]]:
    """The ramp-up sizes of a growing batch, each with its proved schedule, and their costs and problems."""
    values, sizes, stages = derivation.values, derivation.sizes, derivation.stages
    batches: list[SmallerBatch] = []
    held: list[_OfSize] = []
    costs = prices.simulation_costs(derivation.costs, stages)
    proofs = {derivation.batch.num_microbatches: full}
    for segment, steps, batch in derivation.smaller:
        count, config = batch.num_microbatches, at_size(values.config, segment.size)
        if count not in proofs:
            plain, _ = derivation.compute_only(count)
            proofs[count] = proved(values, plain, derivation.frozen_stages, costs, full)
        proof = proofs[count]
        lists, run = _run(proof, costs)
        ranks = derivation.rank_costs(proof.schedule, segment.size)
        held.append((ranks, [] if proof is full else proof.wrong))
        batches.append(
            SmallerBatch(
                *(segment.step, steps, segment.sample, segment.size),
                *(count, batch.accumulation, bubble_of(computing(timed(lists), run), run)),
                run.seconds * batch.accumulation + prices.seconds_after(config, stages, sizes, ranks),
                proof.schedule,
            )
        )
    return tuple(batches), held


def _run(proof: ProvedSchedule, costs: Costs) -> tuple[Schedule, Execution]:
    """(the schedule as it would run, without messages if these are wrong; its execution, empty if it hangs)."""
    schedule = proof.plain if proof.wrong else proof.schedule
    run = attempted(schedule, costs) if proof.wrong or proof.run is None else proof.run
    never: list[list[float]] = [[] for _ in schedule.actions]
    return schedule, Execution(never, never, {}) if run.stuck else run


def _fullest(held: Sequence[tuple[RankCost, ...]]) -> tuple[RankCost, ...]:
    """The highest cost of each pp_rank over all batch sizes; of equal ones the first."""
    return tuple(max(of_rank, key=lambda cost: cost.peak_bytes) for of_rank in zip(*held, strict=True))


def _judge(values: ConfigValues) -> Judge:
    @cache
    def known() -> set[Rule]:
        return {violation.rule for violation in _checked(values)}

    return lambda other: [violation for violation in judged(other) if violation.rule not in known()]


def judged(values: ConfigValues) -> Violations:
    """The problems of values and sizes and, if the sizes are sound, of the memory that they need."""
    # Without a search, which takes seconds: if the even split fits, so does the layout that a search finds.
    violations = beyond(values)
    derivation = derive(values, violations, search=False)
    if violations or derivation is None:
        return [*_checked(values), *violations]
    sound = derivation
    try:
        return [*_checked(values), *memory_violations(values, sound.sizes, lambda: _held(sound))]
    except ScheduleError as error:  # the policy has no order for these sizes
        return [Violation(problem.code, "schedule", problem.message, problem.place) for problem in error.problems]


def _checked(values: ConfigValues) -> Violations:
    return [
        Violation(each.code, each.message, each.message, each.place, *filter(None, [parse_overrides(each.remedy)]))
        for each in check(values.config, values.provenance)
    ]


def _held(derivation: Derivation) -> Sequence[RankCost]:
    """Bytes that the pp_ranks hold, posted receives included, without simulating times."""
    values = derivation.values
    if derivation.choice.searched:
        return least_held(derivation.ways, derivation.batch.num_microbatches)
    plain, _ = derivation.compute_only(settled(values, derivation.choice, derivation.batch.num_microbatches))
    return derivation.rank_costs(presumed(values, plain, derivation.frozen_stages).schedule)


def whose_seconds(config: RunConfig) -> tuple[Derived, ...]:
    """A line that says which program the preset's seconds are for, and how accurate they are."""
    stack = config.cost.stack
    text = f"seconds: {whose_prices(device_of(config), stack)} (cost.stack={stack})"
    return (Derived("cost.stack", stack, text),)


def whose_code(model: ModelConfig) -> tuple[Derived, ...]:
    """Notes on a transformers model: what was proved, and what is trained differently."""
    foreign = foreign_of(model)
    if foreign is None:
        return ()
    proof = f"a miniature in {len(foreign.stages)} stages gave the same bits as the whole"
    equation = f"its own code, of transformers {foreign.transformers}, runs on every stage: {proof}"
    return (Derived("implementation", "transformers", "; ".join((equation, *foreign.notes))), *_kinds_of(foreign))


def _kinds_of(foreign: ForeignModel) -> tuple[Derived, ...]:
    """A line on the kinds of layers of a transformers model; empty if all layers are of one kind."""
    if len(foreign.kinds) < 2:
        return ()
    parts, unnamed = [], "parameters of other shapes" if foreign.adapters is None else "a whole backward"
    for number, kind in enumerate(foreign.kinds):
        own = [index for index, structure in enumerate(foreign.layers) if structure == number]
        shown = ", ".join(map(str, own[:4])) + (", …" if len(own) > 4 else "")
        parts.append(f"{len(own)} with {kind.name or unnamed} (layers {shown})")
    return (Derived("kinds of layers", len(foreign.kinds), "layers: " + "; ".join(parts)),)


def forwards_only(frozen: int) -> tuple[Derived, ...]:
    """Which stages have forwards alone, in words; nothing if all have backwards."""
    if not frozen:
        return ()
    which = "stage 0 trains" if frozen == 1 else f"stages 0 to {frozen - 1} train"
    first = f"stage {frozen} makes no gradient of its input"
    return (Derived("forwards only", frozen, f"{which} nothing: forwards alone, no gradient is sent there, {first}"),)


def transport(config: RunConfig, pp: int, pairs: int) -> tuple[Derived, ...]:
    """A line on the plain transport of messages, and on what it leaves out; none for channels."""
    if pp == 1 or not is_plain(config):
        return ()
    why = ", which auto takes on CUDA" * (config.launch.transport == "auto")
    asked = pairs or config.parallel.overlap_moe_expert_parallel_comm
    alone = ", and no forward beside a backward" if asked else ""
    equation = f"messages: plain{why}: batches on the pipeline's process group, none beside computation{alone}"
    return (Derived("transport", "plain", f"{equation}; {TRANSPORT}=channels overlaps them"),)


def offloaded(
    config: RunConfig, stages: Sequence[StageSpec], costs: Sequence[StageCost], ranks: Sequence[RankCost]
) -> tuple[Derived, ...]:
    """A line on the bytes that move to the host and back, and their seconds; none if nothing is moved."""
    if not any(cost.offloaded_bytes for cost in costs):
        return ()
    slowest = max(costs, key=lambda cost: cost.copy_s)
    layers = max(len(offloaded_layers(config.parallel, stage.layers)) for stage in stages)
    host = max(cost.host_bytes for cost in ranks)
    whole = sum(count_of("decoder", stage.layers) > layers for stage in stages)
    which = f"the first {layers} decoder layers of every stage leave" if whole else "all decoder layers leave"
    equation = (
        f"offloaded: {which} up to {amount(slowest.offloaded_bytes)} of a microbatch to the host, and a rank up to "
        f"{amount(host)} at once; copying takes {1e3 * slowest.copy_s:.3g} ms each way, beside a forward and backward "
        f"of {1e3 * slowest.forward_s:.3g} and {1e3 * slowest.backward_s:.3g} ms"
    )
    return (Derived("offloaded", round(host / GIB.size, 2), equation),)
