"""The Plan, and one rank's part of it: what both towers read.

Knows what a plan holds. Must not know how it is derived (`build`) or written (`encode`), torch, Hydra, files or
processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ppctl.errors import Problem
from ppctl.plan import encode as encoding
from ppctl.plan.types import Derived, RankCost, StageSpec, Timing
from ppctl.schedule.action import Action, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import forwards_alone
from ppctl.topology import ParallelSizes, RankGrid


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
    num_microbatches: int
    """Of one schedule call."""
    bubble_fraction: float
    step_time_s: float
    time_calibrated: bool
    params_total: int
    params_mtp: int
    params_active: int
    params_hf: int
    timing: Timing = field(default_factory=Timing)
    gradient_accumulation_steps: int = 1
    """Schedule calls per optimizer step."""
    tie_groups: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """(canonical parameter name, stages that hold a use of it, in canonical order of uses)."""
    p2p_capacity: int | None = None
    """The capacity that the config asks for on every channel; none lets `lower` choose."""
    derived: tuple[Derived, ...] = ()
    provenance: Mapping[str, str] = field(default_factory=dict)
    """Dotted config key -> where its value came from."""
    problems: tuple[Problem, ...] = ()

    @cached_property
    def forward_schedule(self) -> Schedule:
        """The forward-only twin (evaluation, generation), lowered. Derived, so that plan.json need not hold it."""
        return self.forward_only(self.num_microbatches)

    def forward_only(self, num_microbatches: int) -> Schedule:
        """The lowered forward-only schedule of these stages for any number of microbatches."""
        plain = forwards_alone(self.schedule.placement, num_microbatches)
        return lower(plain, capacity=self.p2p_capacity, batched=self.schedule.batched)

    @cached_property
    def digest(self) -> str:
        """sha256 of what the run executes: sizes, stages, schedule, costs; not of sources, texts, predicted times."""
        return encoding.digest(self)

    def for_rank(self, rank: int) -> RankPlan:
        """What one global rank has to know. Raises IndexError for a rank outside the world."""
        position = RankGrid(self.sizes).coordinates(rank)
        pp_rank = position["pp"]
        stages = tuple(stage for stage in self.stages if stage.pp_rank == pp_rank)
        return RankPlan(rank, pp_rank, position["dp"], stages, self.schedule.actions[pp_rank])

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` reads back to an equal plan; a superset of what `ppctl plan --json` prints."""
        return encoding.encode(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Plan:
        """The inverse of `to_json`."""
        return cls(**encoding.decode(data))


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank's part of the plan."""

    rank: int
    pp_rank: int
    dp_rank: int
    stages: tuple[StageSpec, ...]
    """In chunk order."""
    actions: tuple[Action, ...]
    """Of the lowered training schedule."""
