"""Tables of other systems' names, read from pages in `ppctl/pages`: the meaning of a name here, or why it has none.

Below a heading, every entry is a line, with its names on the lines under it. A `*` in a name stands for any letters;
`name=a|b` lists values with which a setting has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

MEGATRON, AUTOMODEL, TORCHTITAN, BRIDGE = "megatron", "automodel", "torchtitan", "bridge"
SYSTEMS = {
    MEGATRON: "Megatron-LM's flags",
    AUTOMODEL: "NeMo Automodel's YAML",
    TORCHTITAN: "torchtitan's TOML or JSON",
    BRIDGE: "Megatron-Bridge's YAML",
}
"""System whose files `ppctl plan --from` reads -> a description of them."""

SAME, LATER, MEANINGLESS = "Keys that say the same", "Not in this release", "Without a meaning here"
OTHERWISE, MODELS, DEFAULTS, SIZES = "Said in other terms", "Models", "Their defaults", "Sizes"
VALUES, SAMPLES, SEVERAL = "Values with other names", "Samples", "Several values"
"""Headings. `overrides_of` reads the entries of SAME, MODELS and VALUES; entries of DEFAULTS are values."""

OFF = ("null", "false", "none", "disabled", "[]", "{}", "0", "0.0", "")
"""Values with which any setting of a file has no effect."""


@dataclass(frozen=True)
class NameTables:
    """The tables of one system."""

    entries: Mapping[str, Mapping[str, str]]
    """Heading -> entry -> names, with blanks between them."""
    idle: Mapping[str, tuple[str, ...]]
    """Name -> values with which the setting has no effect."""

    def entry(self, heading: str, name: str) -> str | None:
        """The entry below a heading that lists `name`."""
        table = self.entries.get(heading, {})
        return next((entry for entry, names in table.items() if any(_means(one, name) for one in names.split())), None)

    def is_idle(self, name: str, value: str) -> bool:
        """Whether the page lists `value` among those with which `name` has no effect."""
        return any(value in values for one, values in self.idle.items() if _means(one, name))

    @cached_property
    def sections(self) -> frozenset[str]:
        """The first parts of the names."""
        names = " ".join(names for table in self.entries.values() for names in table.values()).split()
        return frozenset(name.partition(".")[0].rstrip("*") for name in names)


def _means(listed: str, name: str) -> bool:
    head, star, tail = listed.partition("*")
    return name.startswith(head) and name.endswith(tail) and len(name) >= len(head + tail) if star else name == listed


@cache
def tables(system: str) -> NameTables:
    """The tables of a system's page in `ppctl/pages`."""
    page = "megatron_flags" if system == MEGATRON else f"{system}_keys"
    path = Path(__file__).resolve().parent.parent / "pages" / f"{page}.md"
    entries: dict[str, dict[str, str]] = {}
    idle: dict[str, tuple[str, ...]] = {}
    for section in path.read_text(encoding="utf-8").split("\n## ")[1:]:
        heading, _, body = section.partition("\n")
        for row in f"\n{body}".split("\n* ")[1:]:
            entry, _, names = row.partition("\n")
            pairs = [name.partition("=") for name in names.split()]
            idle |= {name: tuple(values.split("|")) for name, equals, values in pairs if equals}
            entries.setdefault(heading, {})[entry] = " ".join(name for name, _, _ in pairs)
    return NameTables(entries, idle)


def overrides_of(entry: str, value: str) -> list[tuple[str, str]]:
    """The keys and values that an entry means for `value`: `KEY` and `KEY={}` take the value, `KEY={0}` an item of a
    list; other texts stay. After `: ` come values with other names here, as `adam=adamw`, after ` -- ` a remark."""
    targets, _, words = entry.partition(" -- ")[0].partition(": ")
    value = dict(word.split("=", 1) for word in words.split()).get(value, value)
    items = {f"{{{place}}}": item for place, item in enumerate(value.strip("[]").split(","))} | {"{}": value}
    pairs = (target.partition("=") for target in targets.split())
    return [(key, items.get(text, text.replace("{}", value)) if equals else value) for key, equals, text in pairs]
