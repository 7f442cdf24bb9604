"""Measured costs of a run, for profile.json: one microbatch on every stage, and one message on every channel.

Knows the keys that `plan/profile.py` reads. Must not know prices or plans of other runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch.distributed as dist

from ppctl.comm.groups import gather_values
from ppctl.config.schema import RunConfig
from ppctl.engine.recorder import StepTotals
from ppctl.plan import Plan
from ppctl.plan.profile import subject
from ppctl.schedule.trace import Span, message_times

KEPT = 16
"""Steps that are remembered: one disturbed step, or the slow first one, must not set the price."""


def _medians(steps: Sequence[Mapping[int, float]]) -> dict[int, float]:
    return {stage: median(step[stage] for step in steps) for stage in steps[-1]} if steps else {}


def gather_costs(
    steps: Sequence[StepTotals], spans: list[Span], plan: Plan, config: RunConfig, device: str
) -> dict[str, Any] | None:
    """What the last steps cost, on rank 0: seconds of one microbatch's forward and backward by stage, and of the last
    step's messages by channel (`message_times`). A collective over the world.

    `spans` are those of this rank in the last step; empty on all replicas but the first.
    """
    forward, backward = _medians([step.forward for step in steps]), _medians([step.backward for step in steps])
    own = {stage: (forward[stage], backward[stage]) for stage in forward}, spans
    rows = gather_values(tuple[dict[int, tuple[float, float]], list[Span]], own)
    if dist.get_rank() > 0:
        return None
    measured = {stage: seconds for row, _ in rows for stage, seconds in row.items()}
    layers = {spec.stage: list(map(str, spec.layers)) for spec in plan.stages}
    stages = [
        {"stage": s, "layers": layers[s], "forward_s": f, "backward_s": b} for s, (f, b) in sorted(measured.items())
    ]
    times = message_times([[span for _, spans in rows for span in spans]], plan.schedule.placement)
    messages = [{"source": a, "target": b, "direction": d, "seconds": t} for (a, b, d), t in times.items()]
    return {
        "plan": plan.digest,
        "device": device,
        "subject": subject(config),
        "stages": stages,
        "messages": messages,
    }
