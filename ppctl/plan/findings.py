"""A problem before it is told: what is wrong, and the overrides that might mend it.

`told` keeps only advice that works: each candidate is typed in thought and everything is derived anew. Must not know
what the rules are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from ppctl.errors import Problem
from ppctl.plan.said import Override, Said, command

REMEDIES = 2
"""How many ways out a problem offers."""

MEMORY = "PP-E801"
"""Costly to judge: where one way out was found, longer ones are not looked for."""

_CHAIN = 3
"""How many rules one way out may have to mend: sizes, experts, memory."""


Rule = tuple[str, str]
Overrides = tuple[Override, ...]


class Finding:
    """A broken rule. `subject` tells apart findings of one code; `candidates` are tried in order."""

    __slots__ = ("candidates", "code", "message", "place", "subject")

    def __init__(self, code: str, subject: str, message: str, place: str, *candidates: Overrides) -> None:
        self.code = code
        self.subject = subject
        self.message = message
        self.place = place
        self.candidates = candidates

    @property
    def rule(self) -> Rule:
        """What makes two findings the same."""
        return self.code, self.subject


Findings = list[Finding]


Judge = Callable[[Said], Iterable[Finding]]
"""Finds all that is wrong with something said."""


def told(said: Said, findings: Iterable[Finding], judge: Judge) -> list[Problem]:
    """The findings as problems, with at most REMEDIES remedies each."""
    findings = list(findings)
    rules = {finding.rule for finding in findings}
    return [
        Problem(finding.code, finding.message, "\n".join(_remedies(said, finding, rules, judge)), finding.place)
        for finding in findings
    ]


def _remedies(said: Said, finding: Finding, rules: set[Rule], judge: Judge) -> list[str]:
    """Candidates that work: once typed, the finding's own rule is kept and no other is newly broken.

    Those that mend everything come first. One that newly breaks a single other rule is tried again together with that
    rule's own candidates.
    """
    others = rules - {finding.rule}
    whole: list[str] = []
    partial: list[str] = []
    breaking: list[tuple[Overrides, Finding]] = []
    for candidate in finding.candidates:
        if len(whole) == REMEDIES:
            return whole
        broken = list(judge(said.typed(candidate)))
        new = [other for other in broken if other.rule not in others]
        if not new:
            (partial if broken else whole).append(command(candidate))
        elif len(new) == 1 and new[0].rule != finding.rule:
            breaking.append((candidate, new[0]))
    alone = bool(whole) and finding.code == MEMORY
    for candidate, other in breaking if not alone else ():
        if len(whole) < REMEDIES:
            for text, clean in islice(_together(said, candidate, other, judge, others, {finding.rule}), 1):
                (whole if clean else partial).append(text)
    return list(dict.fromkeys([*whole, *partial]))[:REMEDIES]


def _together(
    said: Said, candidate: Overrides, broken: Finding, judge: Judge, others: set[Rule], mended: set[Rule]
) -> Iterator[tuple[str, bool]]:
    """The candidate with one more for the rule that it breaks, and for the rule that these break then.

    Only what breaks nothing but `others`; with it, whether it breaks nothing at all.
    """
    mended = {*mended, broken.rule}
    breaking: list[tuple[Overrides, Finding]] = []
    for more in broken.candidates:
        both = tuple({**dict(candidate), **dict(more)}.items())
        found = list(judge(said.typed(both)))
        new = [other for other in found if other.rule not in others]
        if not new:
            yield command(both), not found
        elif len(new) == 1 and new[0].rule not in mended and len(mended) < _CHAIN:
            breaking.append((both, new[0]))
    for both, other in breaking:
        yield from _together(said, both, other, judge, others, mended)
