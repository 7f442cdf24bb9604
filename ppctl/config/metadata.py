"""Facts of a configuration key beside type and default: metadata of its field, written here, read by `keys.py`.

    num_layers: int = key(8, positive(MOST_STAGES), names="--num-layers", layout=True)

Must not know any key. A fact on a section's field (`model: ModelConfig = key(ModelConfig, mathematics=True)`) holds for
all its keys.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ppctl.config.limits import Limit

WORKS, LATER, NEEDS, IGNORED, PYTHON = "works", "later", "needs", "ignored", "python"

MEANING = {
    WORKS: "works",
    LATER: "later: comes in a later release, and is refused until then",
    NEEDS: "needs a library or build that ppctl does not use",
    IGNORED: "ignored upstream too, or nothing to act on here: accepted, with a note",
    PYTHON: "works from Python: takes an object, which no text can set",
}
"""Each state begins with one of four words: works, later, needs, ignored."""


@dataclass(frozen=True, slots=True)
class Support:
    """How far this release supports a key."""

    state: str = WORKS
    note: str = ""
    """The feature that is missing, or why the key has no effect."""
    aside: str = ""
    """A remark that `ppctl explain` adds, and the error does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of one key. Names are separated by blanks."""

    limit: Limit | None = None
    """The values that it allows; none accepts all of the type."""
    support: Support = Support()
    names: str = ""
    """Other names that set it: an alias (`pp`), Megatron's flags (`--num-layers`), another system's key."""
    known_as: str = ""
    """Flags and keys of other systems that do not set it; the error about them names this key."""
    verbatim: bool = False
    """Whether text is taken letter by letter, as paths are: commas and brackets in it have no meaning."""
    lines: bool = False
    """Whether its text may have several lines and tabs. All other text is one line without control characters, since it
    gets into scripts, names of files, environments and terminals."""
    mathematics: bool = False
    """Whether another value changes what is computed: `resume` refuses it without --allow."""
    training: bool = False
    """For a key of `model`: whether it changes only how the model is trained, not what its weights are."""
    layout: bool = False
    """Whether a layout is written for one value of it: another value sets a recipe's layout aside."""
    slurm: bool = False
    """Whether it takes effect in jobs submitted to SLURM only."""
    options: str = ""
    """The options of sbatch and srun that ppctl sets by it."""


def key(default: Any, limit: Limit | None = None, **facts: Any) -> Any:
    """A dataclass field with `facts`, the fields of `Facts`; a class as `default` makes a new default each time."""
    metadata = {"key": Facts(limit=limit, **facts)}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def attribute_of(field: str) -> str:
    """The name in Python of a field, where `from` and `async` are words of the language."""
    return f"{field}_" if keyword.iskeyword(field) else field


def facts_of(metadata: Mapping[str, Any]) -> Facts:
    """The facts that `key` has written; nothing special for a plain field."""
    facts: Facts = metadata.get("key", _PLAIN)
    return facts


_PLAIN = Facts()
