"""One YAML file of the configuration: its values, and the line of every key.

Knows YAML, read as OmegaConf reads it: 1e-5 is a number, a date and 12:00:00 are text, a key that occurs twice is an
error. Must not know Hydra's composition or the schema.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ppctl.errors import ConfigError, Problem
from ppctl.files import read_text

_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(_FAST):  # type: ignore[misc,valid-type]  # the base is chosen at run time: C where PyYAML has it
    """YAML 1.1 without its surprises in configs: numbers that are text, text that is a date or counts in sixties."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way of holding them
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in _FAST.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping, in which no key occurs twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} occurs twice", key.start_mark)
            seen.add(key.value)
        mapping: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return mapping


_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def _text_with_colons(tag: str) -> None:
    """Let 12:00:00 be a time limit, where YAML 1.1 reads 43200."""
    read = _Loader.yaml_constructors[tag]
    _Loader.add_constructor(tag, lambda loader, node: node.value if ":" in node.value else read(loader, node))


for _tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float"):
    _text_with_colons(_tag)


@dataclass(frozen=True)
class YamlFile:
    """A file and the name that it goes by in messages."""

    path: Path
    label: str

    @cached_property
    def text(self) -> str:
        """The file's text. Raises ConfigError where it cannot be read."""
        try:
            return read_text(self.path)
        except (OSError, UnicodeDecodeError) as error:
            raise self._error(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None

    @cached_property
    def values(self) -> dict[str, Any]:
        """The mapping in the file, interpolations unresolved. Raises ConfigError where it is not one."""
        return self._parsed[0]

    @cached_property
    def lines(self) -> dict[str, int]:
        """Dotted key -> line, counted from 1; sections included."""
        return self._parsed[1]

    @cached_property
    def _parsed(self) -> tuple[dict[str, Any], dict[str, int]]:
        try:
            loader = _Loader(self.text)
            node = loader.get_single_node()
            tree = None if node is None else loader.construct_document(node)
        except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
            raise self._error(f"is not valid YAML: {error}") from None
        if tree is None:
            return {}, {}
        if not isinstance(tree, dict):
            raise self._error("holds no mapping of keys")
        return {str(key): value for key, value in tree.items()}, dict(_marks(node, ""))

    def _error(self, what: str) -> ConfigError:
        return ConfigError(Problem("PP-E115", f"{self.label} {what}", place=str(self.path)))


def _marks(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        yield from _marks(value, f"{name}.")
