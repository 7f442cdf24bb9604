"""The rows of an answer planned again with options that a search leaves out: recomputation of some stages, offloaded
layers, and the searches for a schedule and a layout, each added to those that have helped. Knows which options a config
leaves free, and about how long they take. Must not know how the searches work, nor clocks: work is counted before it is
done, so that the answer is the same on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ppctl.config.argv import PLACE
from ppctl.config.checks import check
from ppctl.config.parallel_rules import LAYERS, SWITCH
from ppctl.plan import Plan
from ppctl.plan.build import plan_alone
from ppctl.plan.layout_choice import AUTO, RECOMPUTED
from ppctl.plan.memory_limit import GRANULARITY, PUT_OFF
from ppctl.plan.schedule_choice import SCHEDULE
from ppctl.plan.violations import Overrides
from ppctl.search.answer import AnswerRow
from ppctl.search.branch import Planned
from ppctl.search.space import Configuration, SearchSpace

_ACTION_S, _SCHEDULE_S, _LAYOUT_S, _STAGE_S, _NAMED = 8e-6, 2.0, 1.0, 0.1, 7
"""Approximate seconds on a core of 2026 for each action of a plan, for a search for a schedule, for one for a layout,
and for each of its stages; and about how many layouts are searched if both are: one per named schedule."""


class Refined(NamedTuple):
    """A configuration of a row, planned with further overrides."""

    row: int
    planned: Planned
    words: Overrides


@dataclass
class Refinement:
    """Plans rows again, as far as a given amount of work goes."""

    space: SearchSpace
    rows: Sequence[AnswerRow]
    left: float
    """Seconds of work left: each plan takes its share before it is made, or is left out if too little is left."""
    best: Refined | None = None
    """The fastest so far that fits and is faster than the first row."""
    plans: int = 0
    complete: bool = True

    def run(self) -> bool:
        """Refine; returns whether no plan was left out. An interrupt leaves `best`."""
        for number, row in enumerate(self.rows):
            self._refine(Refined(number, row.planned, {}))
        return self.complete

    def _refine(self, own: Refined) -> None:
        """Try the options that a row leaves free, each added to the options that have helped."""
        point, space = own.planned.configuration, self.space
        if GRANULARITY not in space.fixed and point.recomputation != "none":
            none, most = (
                point._replace(recomputation="none"),
                max(len(stage.layers) for stage in own.planned.plan.stages),
            )
            if words := _some_stages(self._plan(own, none, {})):
                own = self._faster(own, point, words)
            for power in range(0 if space.values.is_set(SWITCH) else most.bit_length()):
                own = self._faster(own, none, {SWITCH: True, LAYERS: 2**power})
        for key in (SCHEDULE, "layout") if point.pp > 1 else ():
            if key not in space.fixed and not space.values.source(key).startswith(PLACE):
                # the limit of deferral was chosen for the present schedule
                limited = key == SCHEDULE and space.values_of(point)[PUT_OFF] is not None
                words = {**own.words, key: AUTO, **dict.fromkeys([PUT_OFF] * limited)}
                own = self._faster(own, own.planned.configuration, words)

    def _faster(self, own: Refined, point: Configuration, words: Overrides) -> Refined:
        """The configuration with `words` if it is faster and fits, which may become `best`; else `own`."""
        plan = self._plan(own, point, words)
        if plan is None or plan.problems or not 0 < plan.step_time_s < own.planned.plan.step_time_s:
            return own
        if not (faster := Refined(own.row, Planned(point, plan, 0.0), words)).planned.fits:
            return own
        first = self.rows[0].planned if self.best is None else self.best.planned
        self.best = faster if plan.step_time_s < first.plan.step_time_s else self.best
        return faster

    def _plan(self, own: Refined, point: Configuration, words: Overrides) -> Plan | None:
        """The plan with `words`, whose work is taken from `left`; None if a rule forbids it, or too little is left."""
        values = self.space.values_of(point).overridden(words)
        if check(values.config, values.provenance):
            return None
        plan, layouts = own.planned.plan, _NAMED if words.get(SCHEDULE) == AUTO else 1
        share = _ACTION_S * sum(map(len, plan.schedule.actions)) + _SCHEDULE_S * (layouts > 1)
        share += layouts * (_LAYOUT_S + _STAGE_S * len(plan.stages)) * (words.get("layout") == AUTO)
        if share > self.left:
            self.complete = False
            return None
        self.left, self.plans = self.left - share, self.plans + 1
        return plan_alone(values)


def _some_stages(plan: Plan | None) -> Overrides:
    """Overrides for recomputation only on stages of ranks that lack memory without it; nothing if all or none do."""
    if plan is None or plan.limit is None:
        return {}
    too_full = {cost.pp_rank for cost in plan.pp_ranks if cost.peak_bytes > plan.limit.available_bytes}
    chosen = [number for number, stage in enumerate(plan.stages) if stage.pp_rank in too_full]
    return {RECOMPUTED: chosen} if 0 < len(chosen) < len(plan.stages) else {}
