"""The rows of an answer planned again with what a search leaves out: recomputation of some stages, layers kept in host
memory, and the searches for a schedule and a layout, each on top of what has helped.

Knows which of them a config leaves free. Must not know how those searches work, nor clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ppctl.config.argv import PLACE
from ppctl.config.checks import check
from ppctl.config.parallel_rules import LAYERS, SWITCH
from ppctl.plan import Plan
from ppctl.plan.build import plan_alone
from ppctl.plan.layout_choice import AUTO, RECOMPUTED
from ppctl.plan.memory_limit import GRANULARITY
from ppctl.plan.schedule_choice import SCHEDULE
from ppctl.plan.violations import Overrides
from ppctl.search.answer import AnswerRow
from ppctl.search.branch import Planned
from ppctl.search.space import Configuration, SearchSpace


class Refined(NamedTuple):
    """A configuration of a row, planned with more words."""

    row: int
    planned: Planned
    words: Overrides


def refined(space: SearchSpace, rows: Sequence[AnswerRow]) -> Iterator[Refined | None]:
    """After every plan the fastest so far of those that fit; None until one is faster than the first row. A caller with
    little time interrupts a plan: a search for a layout can take a minute."""
    best = Refined(0, rows[0].planned, {})
    for number, row in enumerate(rows):
        for own in _of_row(space, Refined(number, row.planned, {})):
            best = min(best, own, key=lambda each: each.planned.plan.step_time_s)
            yield best if best.words else None


def _of_row(space: SearchSpace, best: Refined) -> Iterator[Refined]:
    """The fastest so far of a row, after every plan."""
    of = best.planned.configuration
    if GRANULARITY not in space.fixed and of.recomputation != "none":
        none = of._replace(recomputation="none")
        if words := _some_stages(plan_alone(space.values_of(none))):
            yield (best := _faster(space, best, of, words))
        most = max(len(stage.layers) for stage in best.planned.plan.stages)
        for power in range(0 if space.values.is_set(SWITCH) else most.bit_length()):
            yield (best := _faster(space, best, none, {SWITCH: True, LAYERS: 2**power}))
    for key in (SCHEDULE, "layout") if of.pp > 1 else ():
        if key not in space.fixed and not space.values.source(key).startswith(PLACE):
            yield (best := _faster(space, best, best.planned.configuration, {**best.words, key: AUTO}))


def _some_stages(plan: Plan | None) -> Overrides:
    """Recomputation on the stages alone of ranks that hold too much in a plan without; nothing if all or none do."""
    if plan is None or plan.limit is None:
        return {}
    over = {cost.pp_rank for cost in plan.pp_ranks if cost.peak_bytes > plan.limit.available_bytes}
    chosen = [number for number, stage in enumerate(plan.stages) if stage.pp_rank in over]
    return {RECOMPUTED: chosen} if 0 < len(chosen) < len(plan.stages) else {}


def _faster(space: SearchSpace, best: Refined, of: Configuration, words: Overrides) -> Refined:
    """The configuration with `words` if it is faster and fits; else `best`."""
    values = space.values_of(of).overridden(words)
    plan = None if check(values.config, values.provenance) else plan_alone(values)
    if plan is None or plan.problems or not 0 < plan.step_time_s < best.planned.plan.step_time_s:
        return best
    return Refined(best.row, planned, words) if (planned := Planned(of, plan, 0.0)).fits else best
