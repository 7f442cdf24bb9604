"""The result of a rehearsal beside the plan: as a value, as JSON and as a picture.

Knows the names of the JSON's fields. Must not know how ranks are rehearsed, or words.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from ppctl.config.schema import RunConfig
from ppctl.errors import Problem
from ppctl.plan.memory import held_bytes
from ppctl.plan.memory_limit import amount, available_text
from ppctl.plan.plan import Plan
from ppctl.plan.plan_picture import picture
from ppctl.plan.rehearsal import UPDATE, RankKind, RankPeak, peaks_of, scaled
from ppctl.plan.types import RankCost
from ppctl.records.rehearsal_record import Rehearsed
from ppctl.schedule.picture import Picture, RankMemory

_STATE = ("weight_bytes", "gradient_bytes", "optimizer_bytes")


@dataclass(frozen=True)
class Rehearsal:
    """A plan beside what was measured of one rank of each kind."""

    config: RunConfig
    plan: Plan
    short: Plan
    """What was rehearsed: the same with fewer microbatches."""
    measured: tuple[tuple[RankKind, Rehearsed], ...]

    @property
    def microbatches(self) -> tuple[int, int]:
        """Rehearsed, and in a step of the run."""
        short, whole = (plan.num_microbatches * plan.gradient_accumulation_steps for plan in (self.short, self.plan))
        return short, whole

    @cached_property
    def ranks(self) -> tuple[Rehearsed, ...]:
        """The measurements, with the counts of a whole step."""
        return tuple(scaled(each, *self.microbatches) for _, each in self.measured)

    @cached_property
    def peaks(self) -> tuple[RankPeak, ...]:
        """Peaks of all pp_ranks of the rehearsed kinds, by pp_rank."""
        rows = [peak for kind, each in self.measured for peak in peaks_of(self.plan, self.short, kind, each)]
        return tuple(sorted(rows, key=lambda peak: peak.pp_rank))

    def cost_of(self, rank: int) -> RankCost:
        """The plan's cost of a global rank."""
        return self.plan.pp_ranks[self.plan.for_rank(rank).pp_rank]

    def peak_of(self, rank: int) -> RankPeak:
        """The peak of a global rank's pp_rank."""
        pp_rank = self.plan.for_rank(rank).pp_rank
        return next(peak for peak in self.peaks if peak.pp_rank == pp_rank)

    def planned_kept(self, stage: int) -> int:
        """Bytes that the plan says a microbatch keeps on a stage."""
        layers, size = self.plan.stages[stage].layers, self.config.train.micro_batch_size
        return held_bytes(self.config, stage, layers, self.plan.sizes, size)[1]

    @property
    def tight(self) -> bool:
        """Whether all that was measured fits, with less than 5 % to spare."""
        limit = self.plan.limit
        return limit is not None and limit.is_tight(max(peak.peak_bytes for peak in self.peaks))

    def problems(self) -> Iterator[Problem]:
        """Whether the memory does not fit (PP-E801), as measured."""
        limit, worst = self.plan.limit, max(self.peaks, key=lambda peak: peak.peak_bytes)
        if limit is None or worst.peak_bytes <= limit.available_bytes:
            return
        message = (
            f"pp_rank {worst.pp_rank} needs {amount(worst.peak_bytes)} at its peak in {worst.peak_action}, as "
            f"rehearsed, and a {'rank' if limit.ranks > 1 else 'device'} has {available_text(limit)}"
        )
        yield Problem("PP-E801", message, "train.recompute_granularity=full", "launch.device_memory")

    def report(self) -> dict[str, Any]:
        """The JSON that `--json` prints, without the problems."""
        limit = self.plan.limit
        rehearsed, microbatches = self.microbatches
        return {
            "ranks": [self._rank(kind, each) for (kind, _), each in zip(self.measured, self.ranks, strict=True)],
            "pp_ranks": [
                {
                    "pp_rank": peak.pp_rank,
                    "planned_peak_bytes": self.plan.pp_ranks[peak.pp_rank].peak_bytes,
                    "measured_peak_bytes": peak.peak_bytes,
                    "peak_action": peak.peak_action,
                }
                for peak in self.peaks
            ],
            "microbatches": microbatches,
            "microbatches_rehearsed": rehearsed,
            "limit_bytes": None if limit is None else limit.limit_bytes,
            "reserve_bytes": None if limit is None else limit.reserve_bytes,
            "tight": self.tight,
        }

    def _rank(self, kind: RankKind, measured: Rehearsed) -> dict[str, Any]:
        cost, peak = self.cost_of(measured.rank), self.peak_of(measured.rank)
        kept = {memory.stage: memory.kept for memory in measured.stages}
        own = {name: getattr(cost, name) for name in (*_STATE, "peak_bytes")}
        state = {name: getattr(measured, name) for name in _STATE} | {"peak_bytes": peak.peak_bytes}
        return {
            "rank": measured.rank,
            "same_as": [rank for rank in kind.ranks if rank != measured.rank],
            "stages": list(kept),
            "planned": own | {"kept_bytes_per_microbatch": {stage: self.planned_kept(stage) for stage in kept}},
            "measured": state | {"kept_bytes_per_microbatch": kept},
            "peak_action": peak.peak_action,
            "host_waits": [asdict(wait) for wait in measured.host_waits],
            "operations": sum(each.count for each in measured.operations),
            "launches": sum(each.launches for each in measured.operations),
            "layers": [asdict(each) for each in measured.layers],
            "messages": [asdict(each) for each in measured.traffic],
            "seconds": round(measured.seconds, 3),
        }

    def picture(self) -> Picture:
        """Memory as planned and as measured over the step."""
        by_rank = {peak.pp_rank: _memory(peak) for peak in self.peaks}
        drawn = picture(self.plan, self.config)
        return replace(drawn, measured=tuple(by_rank.get(cost.pp_rank) for cost in self.plan.pp_ranks))


def _memory(peak: RankPeak) -> RankMemory:
    return RankMemory(
        peak.base,
        {stage: memory.kept for stage, memory in peak.stages.items()},
        {stage: memory.in_forward for stage, memory in peak.stages.items()},
        {stage: memory.in_backward for stage, memory in peak.stages.items()},
        peak.peak_bytes if peak.peak_action == UPDATE else 0,
    )
