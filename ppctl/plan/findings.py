"""A problem before it is told: what is wrong, and the overrides that might mend it.

`told` keeps only advice that works: each candidate is typed in thought and everything is derived anew. Must not know
what the rules are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ppctl.errors import Problem
from ppctl.plan.said import Override, Said, command

REMEDIES = 2
"""How many ways out a problem offers."""


class Finding:
    """A broken rule. `subject` tells apart findings of one code; `candidates` are tried in order."""

    __slots__ = ("candidates", "code", "message", "place", "subject")

    def __init__(self, code: str, subject: str, message: str, place: str, *candidates: tuple[Override, ...]) -> None:
        self.code = code
        self.subject = subject
        self.message = message
        self.place = place
        self.candidates = candidates

    @property
    def rule(self) -> tuple[str, str]:
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


def _remedies(said: Said, finding: Finding, rules: set[tuple[str, str]], judge: Judge) -> list[str]:
    """Candidates that work: once typed, the finding's own rule is kept and no other is newly broken.

    Those that mend everything come first. One that newly breaks a single other rule is tried again together with that
    rule's first candidate.
    """
    whole: list[str] = []
    partial: list[str] = []
    together: list[tuple[Override, ...]] = []
    for candidate in finding.candidates:
        broken = list(judge(said.typed(candidate)))
        new = [other for other in broken if other.rule not in rules - {finding.rule}]
        if not new:
            (partial if broken else whole).append(command(candidate))
        elif len(new) == 1 and new[0].rule != finding.rule:
            together += [(*candidate, *more) for more in new[0].candidates[:1]]
    whole += [command(candidate) for candidate in together if not list(judge(said.typed(candidate)))]
    return list(dict.fromkeys([*whole, *partial]))[:REMEDIES]
