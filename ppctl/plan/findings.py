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


def told(said: Said, findings: Iterable[Finding], judge: Callable[[Said], Iterable[Finding]]) -> list[Problem]:
    """The findings as problems. `judge` finds all that is wrong with something said.

    A candidate becomes a remedy if, once typed, its own rule is kept and no other is newly broken.
    """
    findings = list(findings)
    rules = {finding.rule for finding in findings}
    problems = []
    for finding in findings:
        remedies: list[str] = []
        for candidate in finding.candidates:
            if len(remedies) == REMEDIES:
                break
            text = command(candidate)
            if text not in remedies and _mends(said.typed(candidate), finding, rules, judge):
                remedies.append(text)
        problems.append(Problem(finding.code, finding.message, "\n".join(remedies), finding.place))
    return problems


def _mends(
    said: Said, finding: Finding, rules: set[tuple[str, str]], judge: Callable[[Said], Iterable[Finding]]
) -> bool:
    return {other.rule for other in judge(said)} <= rules - {finding.rule}
