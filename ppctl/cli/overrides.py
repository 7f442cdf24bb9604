"""The arguments of a command that takes overrides: KEY=VALUE, Megatron's flags, directories of the user's own recipes.

Knows what such words may be and how their problems are collected. Must not know what a command does with them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ppctl.config.argv import normalise
from ppctl.config.keys import nearest
from ppctl.config.resources import RECIPES_PATH, recipes
from ppctl.errors import Problem


def parse(parser: argparse.ArgumentParser, command: str, tokens: Sequence[str]) -> argparse.Namespace:
    """The arguments of `command`, with its normalised `overrides` and the `problems` of its words."""
    own = {flag: action.nargs != 0 for action in parser._actions for flag in action.option_strings}
    found = normalise(tokens, own, command)
    args, strays = parser.parse_known_args(found.rest)
    if args.recipes_dir:
        # The environment reaches every process that this command starts, and every later search for recipes.
        before = os.environ.get(RECIPES_PATH, "")
        os.environ[RECIPES_PATH] = os.pathsep.join([*args.recipes_dir, *filter(None, [before])])
    args.overrides = found.overrides
    args.problems = (*found.problems, *map(_stray, strays))
    return args


def _stray(token: str) -> Problem:
    """The problem of a word that is not an override."""
    close = nearest(token, recipes())
    remedy = f"+recipe={close[0]}" if close else "ppctl --help"
    return Problem("PP-E105", f"{token} is no override: KEY=VALUE", remedy, "command line")
