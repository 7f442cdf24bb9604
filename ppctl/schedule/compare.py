"""The policies side by side, with equal microbatches and costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ppctl.errors import ScheduleError
from ppctl.schedule.policies import POLICIES, Policy, make_schedule
from ppctl.schedule.simulate import Costs, in_flight, simulate
from ppctl.schedule.trace import Trace, bubble_fraction, bubble_rate, step_time

REFERENCE = "1f1b"


@dataclass(frozen=True, slots=True)
class PolicyFigures:
    """A policy's figures. `step` is a multiple of 1F1B's step, `activations` of what 1F1B's first rank holds."""

    policy: Policy
    vpp: int
    trace: Trace
    step: float
    bubble_fraction: float
    bubble_rate: float
    activations: float
    """The most activations on any rank; each counts whole from its F to its B or W."""
    messages: int
    """The messages of all ranks in a step."""


def compare(
    pp: int, num_microbatches: int, vpp: int | None, costs: Callable[[int, int], Costs]
) -> tuple[list[PolicyFigures], dict[str, str]]:
    """(the policies that fit, name -> why another does not). Each has its own number of chunks per rank, or all have
    `vpp`; `costs(stages, chunks per rank)` gives the times. Raises ScheduleError for sizes without a 1F1B."""
    reference = _figured(POLICIES[REFERENCE], pp, num_microbatches, 1, costs, None)
    figures, left_out = [], {}
    for name, policy in POLICIES.items():
        if not policy.trains:
            continue
        try:
            figures.append(_figured(policy, pp, num_microbatches, vpp or policy.chunks, costs, reference))
        except ScheduleError as refusal:
            left_out[name] = refusal.problems[0].message
    return figures, left_out


def _figured(
    policy: Policy,
    pp: int,
    num_microbatches: int,
    vpp: int,
    costs: Callable[[int, int], Costs],
    first: PolicyFigures | None,
) -> PolicyFigures:
    """A policy's figures, with its step as a multiple of `first`'s step; if `first` is None, of its own."""
    schedule = make_schedule(policy.name, pp=pp, vpp=vpp, num_microbatches=num_microbatches)
    trace = simulate(schedule, costs(pp * vpp, vpp))
    step = step_time(first.trace if first else trace)
    return PolicyFigures(
        policy,
        vpp,
        trace,
        step_time(trace) / step if step else 1.0,
        bubble_fraction(trace),
        bubble_rate(trace),
        max(in_flight(schedule)) / vpp / min(pp, num_microbatches),
        num_microbatches * len(schedule.edges),
    )
