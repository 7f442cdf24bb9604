"""The arguments of a command that takes overrides: KEY=VALUE, Megatron's flags, directories of the user's own recipes.

Knows what such words may be and how their problems are collected. Must not know what a command does with them.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from ppctl.config.argv import normalise
from ppctl.config.resources import RECIPES_PATH
from ppctl.config.unknown_words import not_an_override


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
    args.problems = (*found.problems, *map(not_an_override, strays))
    return args
