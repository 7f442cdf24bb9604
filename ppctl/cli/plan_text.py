"""A plan as text: equations, the table of pp_ranks, the schedule."""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.cli.console import aligned, duration, folded, number, prose
from ppctl.cli.pipeline_drawing import Chunk, Row, rows_of, with_header
from ppctl.config.batch_sizes import BatchSizes, last_steps
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem
from ppctl.layout.letters import LETTERS, LayerType
from ppctl.plan import Plan, StageSpec
from ppctl.plan.memory_limit import Unit, amount, peak_terms, unit_for, used_text
from ppctl.plan.prices import predicted, simulation_costs
from ppctl.schedule.text_timeline import timeline_text

_MOST_BATCH_SIZES = 14
_MOST_TIMELINE_STAGES = 16


def blocks(plan: Plan, config: RunConfig, width: int) -> list[str]:
    """The plan in paragraphs: header, table, traffic, the sizes of a batch that grows, and the schedule."""
    head = prose([title(plan), vocabulary(plan, config), *equations(plan), memory_line(plan), *limit_line(plan)], width)
    drawn = f"{prose([legend(plan)], width)}\n{table(plan, width)}"
    sent = [traffic(plan)] if any(plan.traffic) else []
    grows = [batch_sizes(plan, config)] if plan.smaller else []
    return [head, drawn, *sent, *grows, "\n".join([prose(times(plan), width), *timeline(plan, width)])]


def title(plan: Plan) -> str:
    """Name and size of the model."""
    counts = [f"{billions(plan.params_active)} active"] if plan.params_active != plan.params_total else []
    if plan.params_mtp:
        counts += [f"{billions(plan.params_mtp)} more for MTP", f"{billions(plan.params_hf)} as Hugging Face stores it"]
    more = f" ({', '.join(counts)})" if counts else ""
    return f"{plan.name}: {plan.params_total:,} parameters{more}"


def vocabulary(plan: Plan, config: RunConfig) -> str:
    """The rows of the embedding, and their source."""
    source = plan.provenance.get("model.vocab_size", "default").removeprefix("derived: ")
    return f"vocabulary {config.model.vocab_size:,} ({'default, for bytes' if source == 'default' else source})"


def equations(plan: Plan) -> list[str]:
    """The equation of every derived value, once."""
    shown = list(dict.fromkeys(derived.equation for derived in plan.derived))
    if not any(derived.key == "layout" for derived in plan.derived):
        source = plan.provenance.get("parallel.pipeline_model_parallel_layout", "default")
        sizes = plan.sizes
        stages = f"{sizes.num_stages} stages = pp {sizes.pp} x vpp {sizes.vpp}"
        shown.append(f"layout {plan.layout} ({source}): {stages}")
    return shown


def legend(plan: Plan) -> str:
    """The meaning of the letters."""
    mtp = ", m multi-token prediction" if plan.params_mtp else ""
    processes = plan.sizes.world // plan.sizes.pp
    owner = "a process" if processes == 1 else f"a pipeline rank of {processes} processes"
    return f"E embedding, t layer{mtp}, L loss; each row is {owner}, each column a chunk that it owns"


def drawing(plan: Plan) -> str:
    """The layers of each pp_rank: a row per pp_rank (equal neighbours in one), a column per chunk."""
    return aligned(with_header(_rows(plan)))


def _rows(plan: Plan) -> list[Row]:
    """The table's rows: neighbouring pp_ranks share one if they hold equal kinds of layers and as many parameters."""
    return rows_of(map(_chunk, plan.stages), apart=lambda rank: plan.pp_ranks[rank].params)


def _chunk(stage: StageSpec) -> Chunk:
    ids = [layer.index for layer in stage.layers if layer.kind == "decoder"]
    letters = "".join(LETTERS[LayerType(layer.kind)] for layer in stage.layers)
    return Chunk(stage.pp_rank, letters, ids[0] if ids else 0)


def table(plan: Plan, width: int) -> str:
    """The layers and costs of each pp_rank, no wider than `width` if possible; numbers that differ within a row are
    given for its first and its last rank."""
    unit = unit_for(plan.peak_bytes)
    memory = [f"state {unit.name}", "activations", f"peak {unit.name}"]
    rows = _rows(plan)
    costs = [["pp_rank", "params", "FLOPs", "idle", "in flight", *memory], *(_costs(plan, row, unit) for row in rows)]
    layers = [cells[1:] for cells in with_header(rows)]
    full = [[*cost, *cells] for cost, cells in zip(costs, layers, strict=True)]
    layers[0] = ["chunks, first to last"]
    joined = [[*cost, " | ".join(cells)] for cost, cells in zip(costs, layers, strict=True)]
    peak_alone = [[*row[:3], row[4], *row[7:]] for row in joined]  # the peak is the sum of state and activations
    for candidate, right in ((full, 8), (joined, 8), (peak_alone, 5)):
        text = aligned(candidate, right)
        if max(map(len, text.splitlines())) <= width:
            return text
    return aligned(folded(peak_alone, width, " | "), 5)


def _costs(plan: Plan, row: Row, unit: Unit) -> list[str]:
    costs = [plan.pp_ranks[rank] for rank in row.ranks]
    total = sum(stage.flops_forward for stage in plan.stages) or 1
    flops = sum(stage.flops_forward for stage in plan.stages if stage.pp_rank == row.ranks[0])
    return [
        row.span,
        billions(costs[0].params),
        f"{flops / total:.1%}",
        spread([f"{plan.timing.bubbles[rank]:.0%}" for rank in row.ranks] if plan.timing.bubbles else ["-"]),
        spread([str(cost.in_flight) for cost in costs]),
        spread([unit.of(cost.state_bytes) for cost in costs]),
        spread([unit.of(cost.activation_bytes) for cost in costs]),
        spread([unit.of(cost.peak_bytes) for cost in costs]),
    ]


def traffic(plan: Plan) -> str:
    """The messages and bytes that a rank sends in a step, by axis and kind: the least and the most of any pp_rank."""
    by_kind: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for rank in plan.traffic:
        for each in rank:
            by_kind.setdefault((each.axis, each.kind), []).append((each.number, each.bytes))
    unit = unit_for(max(size for sent in by_kind.values() for _, size in sent))
    rows = [["axis", "kind", "number", unit.name, "pp_ranks"]]
    for (axis, kind), sent in sorted(by_kind.items()):
        numbers, sizes = ([min(column), max(column)] for column in zip(*sent, strict=True))
        many = "all" if len(sent) == len(plan.traffic) else f"{len(sent)} of {len(plan.traffic)}"
        rows.append([axis, kind, spread([f"{n:,}" for n in numbers]), spread([unit.of(n) for n in sizes]), many])
    return f"what a rank sends in a step, in rings\n{aligned(rows)}"


def batch_sizes(plan: Plan, config: RunConfig) -> str:
    """The steps in which a growing batch has each size; of many sizes the first and the last ones."""
    rows = [["samples", "microbatches", "steps", "after samples", "bubble", "step s"]]
    segments = BatchSizes.of(config.train).segments
    for segment, last in last_steps(segments, config.train.steps):
        part = plan.of_batch(segment.size)
        calls = f"{part.gradient_accumulation_steps} x " if part.gradient_accumulation_steps > 1 else ""
        first, seconds = segment.step + 1, part.step_time_s
        steps = f"{first:,} to {last:,}" if last > first else f"{first:,}"
        priced = [f"{part.bubble_fraction:.1%}", f"{seconds:.3g}"]
        rows.append([f"{segment.size:,}", f"{calls}{part.num_microbatches}", steps, f"{segment.sample:,}", *priced])
    if len(rows) > _MOST_BATCH_SIZES:
        half = _MOST_BATCH_SIZES // 2
        rows = [*rows[:half], ["...", *[""] * (len(rows[0]) - 1)], *rows[-half:]]
    return f"sizes of the batch while it grows\n{aligned(rows, len(rows[0]))}"


def memory_line(plan: Plan) -> str:
    """The line on the rank whose memory peaks highest."""
    worst = max(plan.pp_ranks, key=lambda cost: cost.peak_bytes)
    terms = peak_terms(worst)
    sign = " =" if "+" in terms else "; at most"
    return f"memory peaks on pp_rank {worst.pp_rank}: {amount(worst.peak_bytes)} per device{sign} {terms}"


def room(plan: Plan) -> str:
    """The share of a device's memory that is free at the peak; empty without a limit."""
    return "" if plan.limit is None else f"{1 - plan.peak_bytes / plan.limit.available_bytes:.0%}"


def limit_line(plan: Plan) -> list[str]:
    """The memory that a rank may hold, and the share of the highest peak; nothing if no limit is known."""
    tight = "; tight: fragmentation of the allocator, which is not planned, may not fit" if plan.tight else ""
    return [f"{line}{tight}" for line in used_text(plan.limit, plan.peak_bytes)]


def times(plan: Plan) -> list[str]:
    """The schedule and its time in three lines; in one if it hangs."""
    timing = plan.timing
    if not timing.pipeline_s:
        return [schedule_line(plan)]
    share = "" if timing.mfu is None else f", MFU {timing.mfu:.1%}"
    rates = (
        f"{timing.tokens_per_s:,.0f} tokens/s, {timing.tokens_per_s_per_device:,.0f} per device "
        f"({timing.tflops_per_device:.3g} TFLOP/s{share})"
    )
    chain = ", ".join(f"{kind} {duration(seconds)}" for kind, seconds in timing.critical if seconds)
    after = f"; then the optimizer {duration(timing.optimizer_s)}" if timing.optimizer_s else ""
    return [schedule_line(plan), rates, f"critical path of a call: {chain}{after}"]


def schedule_line(plan: Plan) -> str:
    """The schedule in one line."""
    calls = plan.gradient_accumulation_steps
    count = f"{calls} calls of " * (calls > 1) + number(plan.num_microbatches, "microbatch", "microbatches")
    if not plan.timing.pipeline_s:
        return f"schedule {plan.schedule.name}: {count}; it deadlocks, so it has no times"
    source = "measured in" if plan.time_calibrated else "uncalibrated for"
    return (
        f"schedule {plan.schedule.name}: {count}, bubble {plan.bubble_fraction:.1%}, "
        f"step about {duration(plan.step_time_s)}, {source} {plan.timing.priced_by}"
        + f"; {len(plan.schedule.pairs)} pairs, whose exchanges of experts hide behind what the other half computes"
        * bool(plan.schedule.pairs)
    )


def timeline(plan: Plan, width: int) -> list[str]:
    """The step as a drawing, if `width` has a column for every forward; else nothing."""
    spans = plan.num_microbatches * plan.sizes.vpp * 3 + 3 * plan.sizes.pp
    if plan.sizes.num_stages > _MOST_TIMELINE_STAGES or spans > width - 20:
        return []
    trace = predicted(plan.schedule, simulation_costs(plan.timing.stages, plan.stages))
    return ["", timeline_text(trace, width).rstrip()] if trace.spans else []


def problem_lines(problems: Sequence[Problem], *, planned: bool) -> str:
    """One line per problem beside a plan, else one line with all codes. stderr has the problems in full."""
    count = f"{len(problems)} problem{'' if len(problems) == 1 else 's'}"
    if not planned:
        return f"no plan: {count}, {', '.join(dict.fromkeys(problem.code for problem in problems))}"
    return "\n".join([f"{count}:", *(f"  {problem.code} {problem.message}" for problem in problems)])


def spread(values: Sequence[str]) -> str:
    """The value, or the first and the last value if they differ."""
    return values[0] if len(set(values)) == 1 else f"{values[0]} to {values[-1]}"


def billions(count: int) -> str:
    """A number of parameters, short."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return str(count)
