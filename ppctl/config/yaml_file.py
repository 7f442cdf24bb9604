"""One YAML file of the configuration: its values, and the line of every key.

Knows YAML as OmegaConf reads it (1e-5 is a number) and marks. Must not know Hydra's composition or the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ppctl.errors import ConfigError, Problem

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class YamlFile:
    """A file and the name that it goes by in messages."""

    path: Path
    label: str

    @cached_property
    def text(self) -> str:
        """The file's text. Raises ConfigError where it cannot be read."""
        try:
            return self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                Problem("PP-E115", f"{self.label} cannot be read: {error}", place=str(self.path))
            ) from None

    @cached_property
    def values(self) -> dict[str, Any]:
        """The mapping in the file, interpolations unresolved. Raises ConfigError where it is not one."""
        try:
            tree = OmegaConf.to_container(OmegaConf.create(self.text), resolve=False)
        except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
            raise ConfigError(
                Problem("PP-E115", f"{self.label} is not valid YAML: {error}", place=str(self.path))
            ) from None
        if tree is None:
            return {}
        if not isinstance(tree, dict):
            raise ConfigError(Problem("PP-E115", f"{self.label} holds no mapping of keys", place=str(self.path)))
        return {str(key): value for key, value in tree.items()}

    @cached_property
    def lines(self) -> dict[str, int]:
        """Dotted key -> line, counted from 1; sections included."""
        root = yaml.compose(self.text, Loader=_LOADER)
        return dict(_marks(root, ""))


def _marks(node: Any, prefix: str) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        yield name, key.start_mark.line + 1
        yield from _marks(value, f"{name}.")
