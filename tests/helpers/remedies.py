"""Remedies as somebody types them who pastes them, and values that nobody means for every key of the schema."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ppctl.cli import plan as plan_command
from ppctl.cli.main import main, parse
from ppctl.config.argv import ALIASES
from ppctl.config.flags import TAKEN
from ppctl.config.keys import text_keys
from ppctl.config.metadata import MOST_RANKS, MOST_STAGES
from ppctl.errors import Problem
from ppctl.launch.planning import planned
from ppctl.plan.schedule_choice import MOST_ACTIONS

ABOUT_A_WORD = ("PP-E101", "PP-E104", "PP-E105", "PP-E107", "PP-E108", "PP-E121", "PP-E122")
"""Codes whose remedy stands for the word that the message names."""


def problems(typed: list[str]) -> list[Problem]:
    """What is wrong with a command line."""
    return planned(parse("plan", plan_command, typed).line)[2]


def name_of(word: str) -> str:
    key = word.lstrip("+~").partition("=")[0]
    return TAKEN[key].name if key in TAKEN else ALIASES.get(key, key)


def mended(typed: list[str], problem: Problem, remedy: list[str]) -> list[str]:
    """The command line with `remedy` in the place of what it names, and without the word that the problem is about."""
    names = tuple(name_of(word) for word in remedy)
    said = problem.message.partition("; did you mean")[0] if problem.code in ABOUT_A_WORD else ""
    kept, words = [], iter(typed)
    for word in words:
        value = next(words, None) if word in TAKEN and not (TAKEN[word].is_switch or TAKEN[word].is_list) else None
        about = word in said or word.lstrip("+~").partition("=")[0] in re.split(r"[ :;=,]", said)
        replaced = any(name_of(word) in (name, f"{name}.{word.rpartition('.')[2].partition('=')[0]}") for name in names)
        if not replaced and not about:
            kept += [word] if value is None else [word, value]
    return [*kept, *remedy]


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


def trials(value: str, shift: int = 0) -> Iterator[tuple[str, ...]]:
    """Every key and alias set to `value`, each on another base than its neighbours and than with another `shift`."""
    names = [key for key in (*text_keys(), *ALIASES) if key not in ("recipe", "scale")]
    for number, key in enumerate(names):
        yield (*BASES[(number + VALUES.index(value) + shift) % len(BASES)], f"{key}={value}")


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
    found = problems(mended(list(typed), problem, words))
    after, told = {(p.code, p.message) for p in found}, {(p.code, p.message) for p in before}
    set_here = tuple(f"{name_of(word)} = {word.partition('=')[2]} " for word in words)
    own = [p for p in found if (p.code, p.message) not in told and p.place.startswith(set_here)]
    if (problem.code, problem.message) in after or any(p.code == problem.code for p in own):
        tally.note("same problem", typed, problem, line)
    elif own:
        tally.note("refused itself", typed, problem, f"{line} -> {own[0]}")
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
