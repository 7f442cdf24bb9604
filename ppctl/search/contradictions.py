"""Typed values with which nothing is left to search: the fewest that contradict each other, and what to type instead.

Knows which values stay and which are searched. Must not know the rules, nor how problems are printed.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from ppctl.config.argv import PLACE, full_name
from ppctl.config.keys import text_keys
from ppctl.errors import ConfigError, Problem
from ppctl.plan import plan_checked
from ppctl.plan.sizes import SEQUENCE
from ppctl.plan.violations import ConfigValues, overrides_text
from ppctl.search.space import GROUPS, SEARCHED, SearchSpace


def contradictions(space: SearchSpace) -> list[Problem]:
    """A problem for each smallest set of typed values that no configuration has, until some configuration has the rest;
    without typed values one of what is not searched."""
    sets: list[list[str]] = []
    while space.freed(chain(*sets)).first is None and [] not in sets:
        kept = [key for key in SEARCHED if key in space.fixed - {*chain(*sets)}]
        for key in list(kept):
            if space.freed(space.fixed - {*kept} | {key}).first is None:
                kept.remove(key)
        sets.append(kept)
    return [_problem(space, kept, {*chain(*sets)} - {*kept}) for kept in sets or [[]]]


def _problem(space: SearchSpace, kept: list[str], others: set[str]) -> Problem:
    """The problem of the values `kept`, as the least configuration with them has it. The remedies are another value for
    each, while `others` are searched, which have problems of their own."""
    values, ways = space.values, {}
    for key in kept:
        free = space.freed({key, *others})
        if free.first is not None:
            ways[key] = free.values_of(free.first)[key]
    typed = [each for key in kept for each in GROUPS[key] if values.source(each).startswith(PLACE)] or kept
    nothing = Problem("PP-E229", "together they leave nothing to search", "", values.cite(*typed))
    own = next(iter(planned_problems(space.freed(space.fixed - {*kept}).neutral)), nothing)
    searched = {full_name(each) for key in SEARCHED if key not in kept for each in GROUPS[key]} | {SEQUENCE}
    lines = dict.fromkeys([*own.place.splitlines(), *nothing.place.splitlines()])
    cited = [line for line in lines if line.split(" ")[0] in text_keys().keys() - searched]
    said = f"no configuration has {overrides_text({key: values[key] for key in typed})}: " if kept else ""
    remedy = "\n".join(overrides_text({key: way}) for key, way in ways.items())
    return replace(own, message=said + own.message, remedy=remedy, place="\n".join(cited))


def planned_problems(values: ConfigValues) -> list[Problem]:
    """The problems of a config's plan, but for its memory."""
    try:
        plan_checked(values.config, values.provenance, [])
    except ConfigError as error:
        return list(error.problems)
    return []
