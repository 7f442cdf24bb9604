"""What a step takes: the simulated schedule, the optimizer behind it, and the rates that follow.

Knows Timing. Must not know how stages are priced (`prices`) or schedules run.
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.schema import RunConfig
from ppctl.cost.times import optimizer_seconds
from ppctl.plan.memory import device_of
from ppctl.plan.types import RankCost, StageCost, StageSpec, Timing
from ppctl.schedule.action import Schedule
from ppctl.schedule.critical import critical_path, seconds_by_kind
from ppctl.schedule.trace import Span, Trace, busy_time, step_time
from ppctl.topology import ParallelSizes

OPERATIONS = 3
"""A step's model FLOPs are three forwards': the backward is twice one. Recomputation does not count."""


def timing(
    config: RunConfig,
    stages: Sequence[StageSpec],
    sizes: ParallelSizes,
    schedule: Schedule,
    trace: Trace,
    costs: Sequence[StageCost],
    ranks: Sequence[RankCost],
    calls: int,
    priced_by: str,
) -> Timing:
    """All times of `calls` schedule calls and one optimizer step."""
    device = device_of(config)
    pipeline = step_time(trace)
    optimizer = max(optimizer_seconds(r.weight_bytes, r.gradient_bytes, r.optimizer_bytes, device) for r in ranks)
    step = calls * pipeline + optimizer
    tokens = config.train.global_batch_size * config.data.seq_length
    flops = OPERATIONS * sum(s.flops_forward for s in stages) * schedule.num_microbatches * calls * sizes.dp
    rate = flops / step / sizes.world if pipeline else 0.0
    rows: list[list[Span]] = [[] for _ in range(trace.pp)]
    for span in trace.spans:
        rows[span.pp_rank].append(span)
    return Timing(
        priced_by=priced_by,
        pipeline_s=pipeline,
        optimizer_s=optimizer,
        tokens_per_s=tokens / step if pipeline else 0.0,
        tokens_per_s_per_device=tokens / step / sizes.world if pipeline else 0.0,
        tflops_per_device=rate / 1e12,
        mfu=rate / device.bf16_flops if device.name != "cpu" else None,
        bubbles=tuple(1 - busy_time(row) / pipeline for row in rows) if pipeline else (),
        critical=tuple(seconds_by_kind(critical_path(schedule, trace)).items()),
        stages=tuple(costs),
    )
