"""The facts of a configuration key other than its type and default: metadata of the field, which `keys.py` reads.

    num_layers: int = key(8, positive(MOST_STAGES), names="--num-layers", layout=True)

A fact on a section's field (`model: ModelConfig = key(ModelConfig, mathematics=True)`) holds for all its keys. An upper
bound is what can be planned on a laptop within seconds, above what any real job needs (decision 27).
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ppctl.config.quantities import activations, memory_bytes, rollback_of, seconds, slurm_seconds, steps_of
from ppctl.topology import axes_of

LARGEST = 2**63 - 1
"""The largest 64-bit number: the bound of values that plans do not compute with (a rate, a seed, a number of steps)."""
MOST_RANKS = 2**20
"""Ranks of a job, and of each of its axes but pp."""
MOST_PP_RANKS = 1024
"""Ranks of a pipeline."""
MOST_STAGES = 4096
"""Stages of a pipeline, and so chunks of a pp_rank; decoder layers of a model."""
MOST_WIDTH = 2**20
"""Width of the residual stream, and of its projections."""
MOST_INNER_WIDTH = 2**22
"""Width of a feed-forward."""
MOST_HEADS = 2**16
"""Heads, experts, groups of heads or experts, and the width of one head."""
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
        """Whether `value` is within the bounds; nan is not."""
        return (value > 0 or (self.zero and value == 0)) and (value < self.most if self.below else value <= self.most)

    @property
    def is_size(self) -> bool:
        """Whether plans compute with the key's value: nothing can be planned if the value is out of bounds."""
        return 1 < self.most < LARGEST

    @property
    def words(self) -> str:
        """The limit in words, such as `greater than 0, at most 4096`."""
        most = self.most if self.most < LARGEST else f"{self.most:.2g}"
        return f"{'0 or more' if self.zero else 'greater than 0'}, {'below' if self.below else 'at most'} {most}"


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some words; with `any_case`, in capital or small letters."""

    names: tuple[str, ...]
    any_case: bool = False

    def allows(self, value: Any) -> bool:
        """Whether `value` is one of the words."""
        return value in self.names or (self.any_case and isinstance(value, str) and value.lower() in self.names)

    @property
    def words(self) -> str:
        """The limit in words, such as `one of cuda, cpu, any`."""
        return f"one of {', '.join(self.names)}"


@dataclass(frozen=True, slots=True)
class Form:
    """A value that `read` accepts without ValueError."""

    words: str
    read: Callable[[Any], object]
    example: str | None = None

    def allows(self, value: Any) -> bool:
        """Whether `read` accepts `value`."""
        try:
            self.read(value)
        except ValueError:
            return False
        return True


Limit = Bounds | OneOf | Form

BELOW_ONE = Bounds(1, zero=True, below=True)
"""A share that may be 0, below 1."""

SHARE = Bounds(1)
"""A share above 0, at most 1."""


def positive(most: int = LARGEST) -> Bounds:
    """A number above 0."""
    return Bounds(most)


def not_negative(most: int = LARGEST) -> Bounds:
    """A number from 0 on."""
    return Bounds(most, zero=True)


def one_of(*names: str, any_case: bool = False) -> OneOf:
    """One of `names`."""
    return OneOf(names, any_case)


def matching(pattern: str) -> Callable[[Any], object]:
    """Return a `read` for `Form` that accepts text that matches `pattern`, and all values that are not text."""
    form = re.compile(pattern)

    def read(value: Any) -> object:
        if isinstance(value, str) and form.fullmatch(value) is None:
            raise ValueError(value)
        return value

    return read


def each_of(names: tuple[str, ...]) -> Form:
    """One of `names`, or a list of them."""

    def read(value: Any) -> object:
        listed = value if isinstance(value, list | tuple) else [value]
        if not listed or any(each not in names for each in listed):
            raise ValueError(value)
        return value

    return Form(f"one of {', '.join(names)}, or a list of these", read)


def sizes(number: int, least: int) -> Form:
    """A list of `number` whole numbers from `least` on."""

    def read(value: Any) -> object:
        if len(value) != number or any(type(size) is not int or not least <= size <= MOST_RANKS for size in value):
            raise ValueError(value)
        return value

    return Form(f"{number} numbers, each {least} or more", read)


NOT_EMPTY = Form("not empty", matching(r"(?s).+"))
ABSOLUTE = Form("an absolute path, as /dev/shm/ppctl", matching(r"(?s)/.+"))
ONE_LINE = Form("one line of text, not empty", matching(r".*\S.*"))
DIRECTORY_NAME = Form(
    "the name of a directory: up to 100 letters that can be printed, no slashes, not . or ..",
    matching(r"(?!\.+$)(?!\s)[^/\\]{1,100}(?<!\s)"),
)
PYTHON_NAMES = Form(
    "names in modules of Python, as [package.module:name]",
    lambda value: [matching(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")(each) for each in value],
)
TIME = Form("a length of time, as 11h50m", seconds, "11h50m")
SLURM_TIME = Form("a time limit of SLURM's, as 30 (minutes), 12:00:00 or 2-00:00:00", slurm_seconds, "12:00:00")
MEMORY = Form("an amount of memory, as 80GiB", memory_bytes, "80GiB")
ACTIVATIONS = Form("memory, as 60GiB, or a multiple of what 1F1B keeps, above 0 and at most 8", activations, "60GiB")
RESERVE = Form("auto or an amount of memory, as 2GiB", lambda text: text == "auto" or memory_bytes(text))
ON_BAD_STEP = Form("stop, skip or rollback:N, as rollback:100", rollback_of)
STEPS = Form("a range of 1 to 100 steps, as 3:5 for steps 3 and 4", steps_of, "3:5")
RANK_ORDER = Form("tp, cp, ep, dp and pp, once each, with dashes between them", axes_of)


# Facts

WORKS, LATER, NEEDS, IGNORED, PYTHON = "works", "later", "needs", "ignored", "python"

MEANING = {
    WORKS: "works",
    LATER: "later: comes in a later release, and is refused until then",
    NEEDS: "needs a library or build that ppctl does not use",
    IGNORED: "ignored upstream too, or nothing to act on here: accepted, with a note",
    PYTHON: "works from Python: takes an object, which no text can set",
}
"""State -> its meaning, which begins with one of four words: works, later, needs, ignored."""


@dataclass(frozen=True, slots=True)
class Support:
    """This release's support for a key."""

    state: str = WORKS
    note: str = ""
    """The feature that is missing, or why the key has no effect."""
    aside: str = ""
    """A remark that `ppctl explain` adds, and the error does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one key. Names are separated by blanks."""

    limit: Limit | None = None
    """The allowed values; None allows all values of the type."""
    support: Support = Support()
    names: str = ""
    """Other names that set the key: an alias (`pp`), Megatron's flags (`--num-layers`), another system's key."""
    known_as: str = ""
    """Flags and keys of other systems that do not set the key; the error about them names it."""
    verbatim: bool = False
    """Whether text is taken literally, as paths are: commas and brackets have no meaning."""
    lines: bool = False
    """Whether the key's text may have several lines and tabs. Other keys' text is one line without control characters,
    since it goes into scripts, file names, environments and terminals."""
    mathematics: bool = False
    """Whether another value changes what is computed: `resume` refuses it without --allow."""
    needs: str = ""
    """`KEY=VALUE` (or `KEY=VALUE,VALUE`), or `KEY` for any value but the default. Unless this holds, the key has no
    effect, and is refused if it is set."""
    training: bool = False
    """For a key of `model`: whether it changes only how the model is trained, not what its weights are."""
    layout: bool = False
    """Whether a layout depends on the key: another value sets a recipe's layout aside."""
    jobs: str = ""
    """The only systems in whose jobs the key takes effect: `slurm`, `kubernetes`, `node` (agents); empty: all."""
    options: str = ""
    """The options of sbatch and srun that ppctl sets from the key."""


def key(default: Any, limit: Limit | None = None, **facts: Any) -> Any:
    """A dataclass field with `facts`, the fields of `Facts`; a class as `default` makes a new default each time."""
    metadata = {"key": Facts(limit=limit, **facts)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def attribute_of(field: str) -> str:
    """The name in Python of a field, where `from` and `async` are keywords."""
    return f"{field}_" if keyword.iskeyword(field) else field
