"""A command line with lists of values (`-m optim.lr=1e-3,3e-3 seed=1,2`) as one command line for each combination."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

from ppctl.config.argv import PLACE, Arguments, quote
from ppctl.config.hydra_source import listed_values
from ppctl.config.keys import value_text
from ppctl.errors import ConfigError, Problem

MOST_RUNS = 256
"""Runs of one command: all plans are held while all are checked."""


def combinations(line: Arguments) -> list[Arguments]:
    """The command line of each run, the last list varying fastest; of equal ones the first. Raises ConfigError for
    lists that Hydra's grammar does not have (PP-E105, PP-E106), and for too many runs (PP-E106)."""
    lists = {key: listed_values(key, text, MOST_RUNS + 1) for key, text in line.lists.items()}
    if prod(map(len, lists.values())) > MOST_RUNS:
        message = f"{' x '.join(f'{len(values)} of {key}' for key, values in lists.items())} are too many runs"
        raise ConfigError(Problem("PP-E106", f"{message}: at most {MOST_RUNS}", "ppctl explain PP-E106", PLACE))
    words = [[f"{key}={quote(key, value_text(value))}" for value in values] for key, values in lists.items()]
    found = dict.fromkeys(product(*words))
    return [replace(line, overrides=[*line.overrides, *each], lists={}, problems=[*line.problems]) for each in found]
