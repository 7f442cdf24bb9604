"""Typing a remedy: the command line that somebody has who pastes it."""

import re

from ppctl.cli import plan as plan_command
from ppctl.cli.main import parse
from ppctl.cli.plan import planned
from ppctl.config.argv import ALIASES
from ppctl.config.flags import MEGATRON
from ppctl.errors import Problem

ABOUT_A_WORD = ("PP-E101", "PP-E104", "PP-E105", "PP-E107", "PP-E108", "PP-E121", "PP-E122", "PP-E124")
"""Codes whose remedy stands for the word that the message names."""


def problems(typed: list[str]) -> list[Problem]:
    """What is wrong with a command line."""
    args = parse("plan", plan_command, typed)
    return planned(args.overrides, args.problems)[2]


def name_of(word: str) -> str:
    key = word.lstrip("+~").partition("=")[0]
    return MEGATRON.get(key, ALIASES.get(key, key))


def mended(typed: list[str], problem: Problem, remedy: list[str]) -> list[str]:
    """The command line with `remedy` in the place of what it names, and without the word that the problem is about."""
    names = tuple(name_of(word) for word in remedy)
    said = problem.message.partition("; did you mean")[0] if problem.code in ABOUT_A_WORD else ""
    kept, words = [], iter(typed)
    for word in words:
        value = next(words, None) if word in MEGATRON else None
        about = word in said or word.lstrip("+~").partition("=")[0] in re.split(r"[ :;=,]", said)
        replaced = any(name_of(word) in (name, f"{name}.{word.rpartition('.')[2].partition('=')[0]}") for name in names)
        if not replaced and not about:
            kept += [word] if value is None else [word, value]
    return [*kept, *remedy]
