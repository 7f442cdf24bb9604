"""What one value may be, as metadata on its dataclass field: bounds of a number, a choice of words, no empty text.

    hidden_size: int = field(default=256, metadata=positive(MOST_WIDTH))

Knows no key. Must not know rules between several values: those are `checks.py`'s and the plan's. An upper bound is what
a plan can bear on a laptop within seconds, above what any real job needs (decision 27).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LARGEST = 2**63 - 1
"""The largest number of 64 bits: the bound of what a plan does not count with (a rate, a seed, a number of steps)."""
MOST_RANKS = 2**20
"""Ranks of a job, and of each of its axes but pp."""
MOST_PP_RANKS = 1024
"""Ranks of a pipeline."""
MOST_STAGES = 4096
"""Stages of a pipeline, and so chunks of a pp_rank; decoder layers of a model."""
MOST_WIDTH = 2**20
"""Width of the residual stream, and of what is projected from it."""
MOST_INNER_WIDTH = 2**22
"""Width of a feed-forward."""
MOST_HEADS = 2**16
"""Heads, experts, groups of either, and the width of one head."""
MOST_TOKENS = 2**27
"""Tokens of a sample, positions of a model."""
MOST_VOCABULARY = 2**24
"""Rows of the embedding."""
MOST_SAMPLES = 2**31
"""Samples of an optimizer step."""
MOST_IN_A_MICROBATCH = 2**20
"""Samples of a microbatch."""
MOST_CAPACITY = 2**16
"""Messages under way on a channel."""
MOST_WORKSPACE_MIB = 2**20
"""Size of a workspace: a TiB."""
MOST_PREDICTED = 64
"""Multi-token prediction layers."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """A number above 0 (or, with `zero`, from 0 on) and at most `most` (or, with `below`, below it)."""

    most: int
    zero: bool = False
    below: bool = False

    def allows(self, value: Any) -> bool:
        """Whether `value` lies within; nan does not."""
        return (value > 0 or (self.zero and value == 0)) and (value < self.most if self.below else value <= self.most)

    @property
    def is_size(self) -> bool:
        """Whether plans count with it: nothing can be planned where it is out of bounds."""
        return 1 < self.most < LARGEST

    def message(self, key: str, value: Any) -> str:
        """The rule that `value` breaks."""
        del value
        return f"{key} must be {self.words}"

    @property
    def words(self) -> str:
        """As `greater than 0, at most 4096`."""
        return f"{'0 or more' if self.zero else 'greater than 0'}, {'below' if self.below else 'at most'} {self.most}"


@dataclass(frozen=True, slots=True)
class Choice:
    """One of some words; with `any_case`, in capital or small letters."""

    names: tuple[str, ...]
    any_case: bool = False

    def allows(self, value: Any) -> bool:
        """Whether `value` is one of them."""
        return value in self.names or (self.any_case and isinstance(value, str) and value.lower() in self.names)

    def message(self, key: str, value: Any) -> str:
        """The rule that `value` breaks."""
        del value
        return f"{key} is {self.words}"

    @property
    def words(self) -> str:
        """As `one of cuda, cpu, any`."""
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """Text with at least one letter."""

    words = "not empty"

    def allows(self, value: Any) -> bool:
        """Whether `value` says anything."""
        return bool(value != "")

    def message(self, key: str, value: Any) -> str:
        """The rule that `value` breaks."""
        del value
        return f"{key} is empty"


Limit = Bounds | Choice | NotEmpty

_NAME = "limit"


def limit_of(metadata: Mapping[str, Any]) -> Limit | None:
    """The limit in a field's metadata, where it has one."""
    return metadata.get(_NAME)


def positive(most: int = LARGEST) -> dict[str, Limit]:
    """Metadata of a number above 0."""
    return {_NAME: Bounds(most)}


def not_negative(most: int = LARGEST) -> dict[str, Limit]:
    """Metadata of a number from 0 on."""
    return {_NAME: Bounds(most, zero=True)}


def below_one() -> dict[str, Limit]:
    """Metadata of a share: 0 or more, below 1."""
    return {_NAME: Bounds(1, zero=True, below=True)}


def one_of(*names: str, any_case: bool = False) -> dict[str, Limit]:
    """Metadata of a word."""
    return {_NAME: Choice(names, any_case)}


def not_empty() -> dict[str, Limit]:
    """Metadata of text."""
    return {_NAME: NotEmpty()}
