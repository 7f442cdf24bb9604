"""A config with the source of each value, and its violations: broken rules with remedies to try.

`ConfigValues.overridden` gives the config with more overrides on the command line, and `as_problems` keeps only
remedies that work: everything is derived again with each candidate.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from ppctl.config.argv import ALIASES, LAYOUT, PLACE
from ppctl.config.batch_sizes import MICRO_BATCH, STEPS, run_length
from ppctl.config.keys import as_typed, keys_with, value_text
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem

Overrides = Mapping[str, Any]
"""Alias or dotted key -> value, as on the command line."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """A config and the sources of its values. Keys may be aliases (`pp`, `gbs`) or dotted names."""

    config: RunConfig
    provenance: Mapping[str, str]

    def __getitem__(self, key: str) -> Any:
        """The value of a key."""
        section, _, field = ALIASES.get(key, key).rpartition(".")
        return getattr(getattr(self.config, section), field)

    def source(self, key: str) -> str:
        """The source of the value: "default", a file and line, "command line", "derived: ..."."""
        return self.provenance.get(ALIASES.get(key, key), "default")

    def is_set(self, key: str) -> bool:
        """Whether the user set the key, even to the default; false for null, default and derived values."""
        source = self.source(key)
        return self[key] is not None and source != "default" and not source.startswith("derived")

    def cite(self, *keys: str) -> str:
        """One line per key that has a value: name, value and source."""
        shown = [key for key in keys if self[key] is not None]
        return "\n".join(f"{ALIASES.get(key, key)} = {value_text(self[key])} ({self.source(key)})" for key in shown)

    def overridden(self, overrides: Overrides) -> ConfigValues:
        """The values with `overrides` at the end of the command line. As in composing, typed sizes drop a layout that
        is not typed, both names of a microbatch's size get one value, and samples or tokens set steps."""
        config, provenance = copy.copy(self.config), dict(self.provenance)
        names = {ALIASES.get(key, key): value for key, value in overrides.items()}
        changed = any(name in names and names[name] != self[name] for name in keys_with("layout"))
        if changed and LAYOUT not in names and not self.source(LAYOUT).startswith(PLACE):
            names[LAYOUT] = None
        size, twin = MICRO_BATCH
        if size in names and self.source(twin).startswith("derived"):
            names.setdefault(twin, names[size])
        changed_parts: dict[str, Any] = {}
        for name, value in names.items():
            section, _, field = name.rpartition(".")
            if section not in changed_parts:
                changed_parts[section] = copy.copy(getattr(config, section))
                setattr(config, section, changed_parts[section])
            setattr(changed_parts[section], field, value)
            provenance[name] = f"derived: {size}" if name == twin and name not in overrides else PLACE
        if provenance.get(STEPS, "").startswith("derived") and (steps := run_length(config)) is not None:
            config.train = replace(config.train, steps=steps)
        return ConfigValues(config, provenance)


def overrides_text(overrides: Overrides) -> str:
    """Overrides as a shell takes them."""
    return " ".join(as_typed(key, value) for key, value in overrides.items())


def parse_overrides(text: str) -> Overrides:
    """The overrides in a text of `overrides_text`; fractions stay text. Empty if a word is not KEY=VALUE."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        return {}
    if not all(equals for _, equals, _ in pairs):
        return {}
    return {key: _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    if match := re.fullmatch(r"\[([^][]+)\]", text):
        return [_value(each.strip()) for each in match[1].split(",")]
    words = {"null": None, "true": True, "false": False}
    return words[text] if text in words else int(text) if text.isdecimal() else text


REMEDIES = 2
"""The most remedies that a problem offers."""

MEMORY = "PP-E801"
"""The code of the rule that is costly to judge: once it has a remedy, no combined ones are tried."""

_CHAIN = 3
"""The most rules that one remedy may mend: sizes, experts, memory."""


Rule = tuple[str, str]


class Violation:
    """A broken rule. `subject` distinguishes violations of one code; `candidates` are tried in order."""

    __slots__ = ("candidates", "code", "message", "place", "subject")

    def __init__(self, code: str, subject: str, message: str, place: str, *candidates: Overrides) -> None:
        self.code = code
        self.subject = subject
        self.message = message
        self.place = place
        self.candidates = candidates

    @property
    def rule(self) -> Rule:
        """A key that is equal for violations of the same rule."""
        return self.code, self.subject


Violations = list[Violation]


Judge = Callable[[ConfigValues], Iterable[Violation]]
"""A function that finds all violations of a config."""


def as_problems(values: ConfigValues, violations: Iterable[Violation], judge: Judge) -> list[Problem]:
    """The violations as problems, with at most REMEDIES remedies each."""
    violations = list(violations)
    messages = {violation.rule: violation.message for violation in violations}
    return [
        Problem(each.code, each.message, "\n".join(_remedies(values, each, messages, judge)), each.place)
        for each in violations
    ]


def _remedies(values: ConfigValues, violation: Violation, messages: Mapping[Rule, str], judge: Judge) -> list[str]:
    """Candidates that work: with them the violation's own rule is kept and no other is newly broken. Candidates that
    mend everything come first. Those with which another broken rule gets another message lead to the next refusal, and
    count only if there are no others. A candidate that newly breaks a single rule is tried again, combined with that
    rule's candidates."""
    elsewhere = messages.keys() - {violation.rule}
    whole: list[str] = []
    partial: list[str] = []
    leading: list[str] = []
    breaking: list[tuple[Overrides, Violation]] = []
    for candidate in {overrides_text(each): each for each in violation.candidates}.values():
        if len(whole) == REMEDIES:
            return whole
        broken = list(judge(values.overridden(candidate)))
        new = [each for each in broken if each.rule not in elsewhere]
        if not new:
            leads = any(each.message != messages[each.rule] for each in broken)
            (leading if leads else partial if broken else whole).append(overrides_text(candidate))
        elif len(new) == 1 and new[0].rule != violation.rule:
            breaking.append((candidate, new[0]))
    enough = bool(whole) and violation.code == MEMORY
    for candidate, broken_next in breaking if not enough else ():
        if len(whole) < REMEDIES:
            combined = _combined(values, candidate, broken_next, judge, elsewhere, {violation.rule})
            for text, clean in islice(combined, 1):
                (whole if clean else partial).append(text)
    return list(dict.fromkeys([*whole, *partial] or leading))[:REMEDIES]


def _combined(
    values: ConfigValues, candidate: Overrides, broken: Violation, judge: Judge, elsewhere: set[Rule], mended: set[Rule]
) -> Iterator[tuple[str, bool]]:
    """The candidate combined with candidates of the rule that it breaks, and of the rule that the combination breaks.
    Yields combinations that break only rules in `elsewhere`, and whether they break none."""
    mended = {*mended, broken.rule}
    breaking: list[tuple[Overrides, Violation]] = []
    both: Overrides
    for more in broken.candidates:
        both = {**candidate, **more}
        both = {key: value for key, value in both.items() if values[key] != value} or both
        left = list(judge(values.overridden(both)))
        new = [each for each in left if each.rule not in elsewhere]
        if not new:
            yield overrides_text(both), not left
        elif len(new) == 1 and new[0].rule not in mended and len(mended) < _CHAIN:
            breaking.append((both, new[0]))
    for both, broken_next in breaking:
        yield from _combined(values, both, broken_next, judge, elsewhere, mended)
