"""The config with the source of each value, and what it would be with more overrides on the command line.

Knows dotted keys, aliases and provenance texts. Must not know what values mean.
"""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ppctl.config.argv import ALIASES, LAYOUT, PLACE
from ppctl.config.batch_sizes import STEPS, run_length
from ppctl.config.keys import keys_with
from ppctl.config.schema import RunConfig
from ppctl.errors import pasted

Overrides = Mapping[str, Any]
"""Alias or dotted key -> value, as on the command line."""


@dataclass(frozen=True, slots=True)
class ConfigValues:
    """A config and where its values came from. Keys may be aliases (`pp`, `gbs`) or dotted names."""

    config: RunConfig
    provenance: Mapping[str, str]

    def __getitem__(self, key: str) -> Any:
        """The value of a key."""
        section, _, field = ALIASES.get(key, key).rpartition(".")
        return getattr(getattr(self.config, section), field)

    def source(self, key: str) -> str:
        """The source of the value: "default", a file and line, "command line", "derived: ..."."""
        return self.provenance.get(ALIASES.get(key, key), "default")

    def is_set(self, key: str) -> bool:
        """Whether the user set it, even to the default; false for what is null, a default or derived."""
        source = self.source(key)
        return self[key] is not None and source != "default" and not source.startswith("derived")

    def cite(self, *keys: str) -> str:
        """One line per key that has a value: name, value and source."""
        shown = [key for key in keys if self[key] is not None]
        return "\n".join(f"{ALIASES.get(key, key)} = {self[key]} ({self.source(key)})" for key in shown)

    def overridden(self, overrides: Overrides) -> ConfigValues:
        """The values if `overrides` stood at the end of the command line.

        As when composing, a layout that is not on the command line gives way to sizes that are, and a run of so many
        samples or tokens has the steps that these fill.
        """
        config, provenance = copy.copy(self.config), dict(self.provenance)
        names = {ALIASES.get(key, key): value for key, value in overrides.items()}
        changed = any(name in names and names[name] != self[name] for name in keys_with("layout"))
        if changed and LAYOUT not in names and not self.source(LAYOUT).startswith(PLACE):
            names[LAYOUT] = None
        for name, value in names.items():
            section, _, field = name.rpartition(".")
            part = copy.copy(getattr(config, section))
            setattr(part, field, value)
            setattr(config, section, part)
            provenance[name] = PLACE
        if provenance.get(STEPS, "").startswith("derived") and (steps := run_length(config)) is not None:
            config.train = replace(config.train, steps=steps)
        return ConfigValues(config, provenance)


def overrides_text(overrides: Overrides) -> str:
    """Overrides as a shell takes them."""
    return pasted(*(f"{key}={value_text(value)}" for key, value in overrides.items()))


def value_text(value: Any) -> str:
    """A value as the command line takes it, without quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def parse_overrides(text: str) -> Overrides:
    """The inverse of `overrides_text` for numbers, text, lists of them and null; empty for a text without overrides."""
    try:
        pairs = [word.partition("=") for word in shlex.split(text)]
    except ValueError:
        return {}
    if not all(equals for _, equals, _ in pairs):
        return {}
    return {key: _value(value) for key, _, value in pairs}


def _value(text: str) -> Any:
    if match := re.fullmatch(r"\[([^][]+)\]", text):
        return [_value(each.strip()) for each in match[1].split(",")]
    words = {"null": None, "true": True, "false": False}
    return words[text] if text in words else int(text) if text.isdecimal() else text
