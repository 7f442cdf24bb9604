"""The words of a command that takes overrides: KEY=VALUE, Megatron's flags, and where the user's own recipes are.

Knows what such words may be and how their problems are collected. Must not know what a command does with them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ppctl.config.argv import normalise
from ppctl.config.compose import compose
from ppctl.config.keys import nearest
from ppctl.config.resources import RECIPES_PATH, recipes
from ppctl.errors import ConfigError, Problem


def parse(
    parser: argparse.ArgumentParser, name: str, tokens: Sequence[str], *, tells_problems: bool
) -> argparse.Namespace:
    """The arguments of command `name`, its normalised overrides and its problems, which it `tells_problems` itself.

    Raises ConfigError with every problem, also those of the overrides' keys and values, of a command that does not.
    """
    own = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    found = normalise(tokens, own, name)
    args, strays = parser.parse_known_args(found.rest)
    problems = [*found.problems, *(_stray(token) for token in strays)]
    if args.recipes_dir:
        # The environment reaches whatever this command starts, and every later look at the recipes.
        before = os.environ.get(RECIPES_PATH, "")
        os.environ[RECIPES_PATH] = os.pathsep.join([*args.recipes_dir, *filter(None, [before])])
    if problems and not tells_problems:
        raise ConfigError([*problems, *_problems_of(found.overrides)])
    args.overrides = found.overrides
    args.problems = tuple(problems)
    return args


def _stray(token: str) -> Problem:
    """The problem of a word where an override belongs."""
    close = nearest(token, recipes())
    return Problem(
        "PP-E105",
        f"{token} is no override: KEY=VALUE",
        f"+recipe={close[0]}" if close else "ppctl --help",
        "command line",
    )


def _problems_of(overrides: list[str]) -> tuple[Problem, ...]:
    try:
        compose(overrides)
    except ConfigError as error:
        return error.problems
    return ()
