"""Plan -> Picture: the predicted step, the stages, and the memory of every device during the step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from ppctl.config.schema import RunConfig
from ppctl.cost.activations import stage_activations
from ppctl.geometry.layers import NUMBERED, Layer
from ppctl.plan.memory import halves_of, setting_of
from ppctl.plan.plan import Plan
from ppctl.plan.prices import predicted, simulation_costs
from ppctl.plan.types import StageSpec
from ppctl.schedule.picture import Picture, RankMemory, StageNote


def picture(plan: Plan, config: RunConfig) -> Picture:
    """The picture that `--timeline` draws."""
    flops = [stage.flops_forward for stage in plan.stages]
    trace = predicted(plan.schedule, simulation_costs(plan.timing.stages, plan.stages))
    sizes, calls = plan.sizes, plan.num_microbatches * plan.gradient_accumulation_steps
    micro_batch_size = config.train.global_batch_size // (sizes.dp * calls)
    title = f"{plan.name}: {plan.schedule.name}, pp {sizes.pp} x vpp {sizes.vpp}, {plan.num_microbatches} microbatches"
    timed = "measured costs" if plan.time_calibrated else "predicted, uncalibrated: shares and order, not seconds"
    return Picture(
        title=title,
        subtitle=f"layout {plan.layout}; {timed}",
        trace=trace,
        stages=tuple(_note(stage, sum(flops)) for stage in plan.stages),
        memory=_memory(plan, config, micro_batch_size),
        limit=None if plan.limit is None else max(plan.limit.available_bytes, 0),
    )


def _memory(plan: Plan, config: RunConfig, micro_batch_size: int) -> tuple[RankMemory, ...]:
    """For each pp_rank the planned bytes outside activations, and the activations of one microbatch by stage."""
    setting = setting_of(config, plan.sizes, micro_batch_size)
    alive = [stage_activations(config.model, each.layers, setting, each.stage) for each in plan.stages]
    ends = halves_of(config, plan.stages, setting, alive) if plan.schedule.split else None
    halves = {}
    if ends is not None:
        halves = {op: dict(enumerate(zip(ends.frees[op], ends.needs[op], strict=True))) for op in ends.frees}
    own = [[stage.stage for stage in plan.stages if stage.pp_rank == cost.pp_rank] for cost in plan.pp_ranks]
    return tuple(
        RankMemory(
            cost.peak_bytes - cost.activation_bytes,
            {stage: alive[stage].kept for stage in stages},
            in_forward={stage: alive[stage].in_forward for stage in stages},
            in_backward={stage: alive[stage].in_backward for stage in stages},
            halves=halves,
        )
        for cost, stages in zip(plan.pp_ranks, own, strict=True)
    )


def _note(stage: StageSpec, total: int) -> StageNote:
    share = f", {stage.flops_forward / total:.1%} of the model's forward" if total else ""
    facts = (f"{stage.params:,} parameters{share}",)
    return StageNote(stage.stage, stage.pp_rank, stage.vpp_rank, layers_text(stage.layers) or "empty", facts)


def layers_text(layers: Sequence[Layer]) -> str:
    """`embedding, decoder 0-2`."""
    words = []
    for kind, run in groupby(layers, key=lambda layer: layer.kind):
        ids = [layer.index for layer in run]
        numbers = f" {ids[0]}" if ids[0] == ids[-1] else f" {ids[0]}-{ids[-1]}"
        words.append(kind + (numbers if kind in NUMBERED else ""))
    return ", ".join(words)
