"""A broken rule before it becomes a problem: what is wrong, and the overrides that might mend it.

`as_problems` keeps only advice that works: everything is derived again with each candidate. Must not know what the
rules are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from ppctl.errors import Problem
from ppctl.plan.config_values import ConfigValues, Overrides, overrides_text

REMEDIES = 2
"""The most remedies that a problem offers."""

MEMORY = "PP-E801"
"""Costly to judge: once one remedy is found, combined ones are not looked for."""

_CHAIN = 3
"""The most rules that one remedy may have to mend: sizes, experts, memory."""


Rule = tuple[str, str]


class Violation:
    """A broken rule. `subject` tells apart violations of one code; `candidates` are tried in order."""

    __slots__ = ("candidates", "code", "message", "place", "subject")

    def __init__(self, code: str, subject: str, message: str, place: str, *candidates: Overrides) -> None:
        self.code = code
        self.subject = subject
        self.message = message
        self.place = place
        self.candidates = candidates

    @property
    def rule(self) -> Rule:
        """The key by which two violations are the same one."""
        return self.code, self.subject


Violations = list[Violation]


Judge = Callable[[ConfigValues], Iterable[Violation]]
"""Finds all that is wrong with a config."""


def as_problems(values: ConfigValues, violations: Iterable[Violation], judge: Judge) -> list[Problem]:
    """The violations as problems, with at most REMEDIES remedies each."""
    violations = list(violations)
    messages = {violation.rule: violation.message for violation in violations}
    return [
        Problem(each.code, each.message, "\n".join(_remedies(values, each, messages, judge)), each.place)
        for each in violations
    ]


def _remedies(values: ConfigValues, violation: Violation, messages: Mapping[Rule, str], judge: Judge) -> list[str]:
    """Candidates that work: with them the violation's own rule is kept and no other is newly broken.

    Those that mend everything come first, and those last with which another rule is broken by other values than it is
    now: typed, they lead to the next refusal. A candidate that newly breaks a single other rule is tried again,
    combined with that rule's own candidates.
    """
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
    """The candidate with one more for the rule that it breaks, and for the rule that these break then.

    Yields only what breaks no rule but those `elsewhere`, and whether it breaks none at all.
    """
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
