"""The plan: everything that follows from a RunConfig, checked, priced and frozen.

Knows how the sizes, the layout, the stages, the schedule and the costs hang together. Must not know torch, Hydra, files
or processes. `build_plan` derives; the types below are what both towers read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppctl.errors import Problem
from ppctl.schedule.action import Schedule
from ppctl.topology import ParallelSizes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape and dtype name (`float32`, `bfloat16`) of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class StageSpec:
    """One stage: what it holds and what crosses its edges. Enough to build it."""

    stage: int
    pp_rank: int
    vpp_rank: int
    layers: tuple[str, ...]
    """In model order: "embedding", "decoder.0", ..., "mtp.0", "loss"; empty for a stage that only passes on."""
    receives: tuple[TensorSpec, ...]
    """The activation message that comes in (empty on the first stage); its gradient goes back in the same shape."""
    sends: tuple[TensorSpec, ...]
    params: int
    """Parameters built here, replicas included."""
    replicated_params: int
    """Of these, copies of a parameter whose canonical owner is an earlier use (tied output, MTP's embedding)."""
    flops_forward: int
    """Model FLOPs of one microbatch's forward (matrix products; causal attention halved; active experts only)."""


@dataclass(frozen=True, slots=True)
class RankCost:
    """What one pp_rank holds, in bytes per device."""

    pp_rank: int
    params: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    peak_bytes: int
    in_flight: int
    """Most (stage, microbatch) activations alive at once, from the start of F to the end of B (or of W)."""


@dataclass(frozen=True, slots=True)
class Derived:
    """A value that follows from others, with the equation that is printed."""

    key: str
    value: Any
    equation: str


@dataclass(frozen=True)
class Plan:
    """A run, derived. Frozen; `to_json` and `from_json` are inverses; `digest` names it."""

    name: str
    sizes: ParallelSizes
    layout: str
    """Canonical layout string."""
    stages: tuple[StageSpec, ...]
    pp_ranks: tuple[RankCost, ...]
    schedule: Schedule
    """Lowered: with messages, gradient sync and capacities."""
    forward_schedule: Schedule
    """The forward-only twin (evaluation, generation)."""
    num_microbatches: int
    bubble_fraction: float
    step_time_s: float
    time_calibrated: bool
    params_total: int
    params_mtp: int
    params_active: int
    params_hf: int
    tie_groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(canonical parameter name, stages that hold a use of it, in canonical order of uses)."""
    derived: tuple[Derived, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Dotted config key -> where its value came from."""
    problems: tuple[Problem, ...] = ()

    def for_rank(self, rank: int) -> RankPlan:
        """What one global rank has to know."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of the plan."""

    rank: int
    pp_rank: int
    dp_rank: int
    stages: tuple[StageSpec, ...]
    actions: tuple[Any, ...]
