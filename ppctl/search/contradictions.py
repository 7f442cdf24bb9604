"""Typed values with which nothing is left to search: the fewest that contradict each other, and what to type instead.

Knows which values stay and which are searched. Must not know the rules, nor how problems are printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from ppctl.config.argv import PLACE, full_name
from ppctl.config.checks import check
from ppctl.config.keys import text_keys
from ppctl.errors import ConfigError, Problem
from ppctl.plan import plan_checked
from ppctl.plan.sizes import SEQUENCE
from ppctl.plan.violations import REMEDIES, ConfigValues, Overrides, overrides_text, parse_overrides
from ppctl.search.space import GROUPS, SEARCHED, SearchSpace, divisors


def contradictions(space: SearchSpace) -> list[Problem]:
    """A problem for each smallest set of typed values that no configuration has, until some configuration has the rest.
    One without typed values is of what is not searched."""
    sets: list[list[str]] = []
    while space.freed(chain(*sets)).first is None and [] not in sets:
        kept = [key for key in SEARCHED if key in space.fixed - {*chain(*sets)}]
        for key in list(kept):
            if space.freed(space.fixed - {*kept} | {key}).first is None:
                kept.remove(key)
        sets.append(kept)
    return [_problem(space, kept, {*chain(*sets)} - {*kept}) for kept in sets]


def _problem(space: SearchSpace, kept: list[str], others: set[str]) -> Problem:
    """The problem of the values `kept`, with the words of the least configuration that has them; `others` are at fault
    as well, and taken to be mended."""
    typed = [each for key in kept for each in GROUPS[key] if space.values.source(each).startswith(PLACE)] or kept
    least = space.freed(space.fixed - {*kept}).neutral
    said = f"no configuration has {overrides_text({key: space.values[key] for key in typed})}" if kept else ""
    own = next(iter([*check(least.config, least.provenance), *planned_problems(least)]), None)
    own = own or Problem("PP-E229", "together they leave nothing to search", "", space.values.cite(*typed))
    searched = {full_name(each) for key in SEARCHED if key not in kept for each in GROUPS[key]} | {SEQUENCE}
    cited = [line for line in own.place.splitlines() if line.split(" ")[0] in text_keys().keys() - searched]
    remedies = dict.fromkeys(map(overrides_text, islice(_instead(space, kept, others, own.remedy), REMEDIES)))
    return replace(
        own, message=": ".join(filter(None, [said, own.message])), remedy="\n".join(remedies), place="\n".join(cited)
    )


def planned_problems(values: ConfigValues) -> list[Problem]:
    """The problems of a config's plan, but for its memory."""
    try:
        plan_checked(values.config, values.provenance, [])
    except ConfigError as error:
        return list(error.problems)
    return []


def _instead(space: SearchSpace, kept: list[str], others: set[str], remedy: str) -> Iterator[Overrides]:
    """Words with which a configuration is left: a value's nearest, then a remedy's that is not searched."""
    searched = {full_name(key) for key in SEARCHED} | {SEQUENCE}
    for key in kept:
        yield from islice(_nearest(space, key, others), 1 if kept[1:] else REMEDIES)
    for line in remedy.splitlines():
        words = {key: value for key, value in parse_overrides(line).items() if full_name(key) not in searched}
        if len(words) == 1 and space.freed(others, words).first is not None:
            yield words


def _nearest(space: SearchSpace, key: str, others: set[str]) -> Iterator[Overrides]:
    """Other values of a key with which a configuration is left, those like the typed one first."""
    typed, free = space.values[key], space.freed({key, *others})
    ways: list[Any] = [] if free.first is None else [free.values_of(free.first)[key]]
    if ways and isinstance(typed, int):
        sizes = {*divisors(space.world), *divisors(space.values["gbs"])} - {typed}
        ways = sorted(sizes, key=lambda size: (abs(size - typed), size))
    yield from ({key: way} for way in ways if space.freed(others, {key: way}).first is not None)
