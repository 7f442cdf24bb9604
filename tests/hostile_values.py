"""Values that nobody means, for every key of the schema; and what `ppctl plan` makes of one of them."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from typed_remedies import mended, problems

from ppctl.cli.main import main
from ppctl.config.argv import ALIASES
from ppctl.config.keys import text_keys
from ppctl.config.limits import MOST_RANKS, MOST_STAGES
from ppctl.errors import Problem
from ppctl.plan.schedule_choice import MOST_ACTIONS

BASES = (
    (),
    ("+recipe=quickstart",),
    ("+recipe=deepseek_v3",),
    ("+recipe=deepseek_v3", "+scale=smoke"),
    ("+recipe=llama3_8b", "+scale=smoke"),
)
VALUES = (
    "0", "-1", "1", "-0.0", "0.5", "3", "1e6", str(2**31), str(2**63), str(2**64 + 1), "1e12", "1e400", "nan", "-inf",
    "", "null", "true", "[]", "{}", "[-1]", "word", "é漢\u202e", "x" * 20_000, "9" * 5000, "[" * 500, "@/dev/zero",
    "~nobody", "${nothing}", "1e-999999999",
)  # fmt: skip

ACCEPTED = (0, 2, 4)


def trials(value: str) -> Iterator[tuple[str, ...]]:
    """Every key and alias set to `value`, each on another base than its neighbours."""
    names = [key for key in (*text_keys(), *ALIASES) if key not in ("recipe", "scale")]
    for number, key in enumerate(names):
        yield (*BASES[(number + VALUES.index(value)) % len(BASES)], f"{key}={value}")


@dataclass
class Tally:
    """What became of the problems and remedies of several trials."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, kind: str, typed: tuple[str, ...], problem: Problem, line: str = "") -> None:
        """Count one more, and keep what it was."""
        self.counts[kind] += 1
        shown = " ".join(word[:80] for word in typed)
        self.wrong.append(f"{kind}: {shown}: {problem.code} {problem.message[:200]} -- {line[:200]}")


def attempt(typed: tuple[str, ...], tally: Tally) -> None:
    """Plan what was typed, as text and as JSON, and type every remedy. Raises whatever escapes `ppctl plan`."""
    tally.counts["trials"] += 1
    code, report = planned_json(typed)
    assert code in ACCEPTED, (typed, code)
    assert (code == 0) == (not report["problems"]), typed
    if report["stages"]:
        axes, schedule = report["parallel"], report["schedule"]
        assert 2 * axes["pp"] * axes["vpp"] * schedule["microbatches"] <= MOST_ACTIONS
        assert axes["pp"] * axes["vpp"] <= MOST_STAGES
        assert report["world_size"] <= MOST_RANKS
        assert quietly("plan", *typed)[0] == code
    before = [Problem(**problem) for problem in report["problems"]]
    for problem in before:
        tally.counts["problems"] += 1
        if not problem.remedy and "leave it out" not in problem.message:
            tally.note("without a remedy", typed, problem)
        for line in problem.remedy.splitlines():
            tally.counts["remedies"] += 1
            judge(typed, before, problem, line, tally)


def judge(typed: tuple[str, ...], before: list[Problem], problem: Problem, line: str, tally: Tally) -> None:
    """Type one remedy, and count what comes of it."""
    words = shlex.split(line)
    if words[0] == "ppctl":
        if quietly(*words[1:])[0] != 0:
            tally.note("command that fails", typed, problem, line)
        return
    after = {(p.code, p.message) for p in problems(mended(list(typed), problem, words))}
    if (problem.code, problem.message) in after:
        tally.note("same problem", typed, problem, line)
    elif after - {(p.code, p.message) for p in before}:
        tally.note("new problem", typed, problem, f"{line} -> {sorted(after)}")


def quietly(*words: str) -> tuple[int, str]:
    """The exit code and stdout of one command line of ppctl's, in this process."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = main(words)
    return code, out.getvalue()


def planned_json(typed: tuple[str, ...]) -> tuple[int, dict]:
    """The exit code and the JSON of `ppctl plan --json`."""
    code, text = quietly("plan", "--json", *typed)
    return code, json.loads(text)
