"""One YAML file of the configuration: its values, and the line of every key.

Read as OmegaConf reads it: 1e-5 is a number, a date and 12:00:00 are text, a key that occurs twice is an error.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.files import nearest_there, read_text

_FAST = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

MOST_VALUES, DEEPEST, _LONGEST_KEY = 100_000, 64, 200
_MERGE, _INT, _FLOAT = (f"tag:yaml.org,2002:{name}" for name in ("merge", "int", "float"))


class PlainLoader(_FAST):  # type: ignore[misc,valid-type]  # the base is chosen at run time: C if PyYAML has it
    """PyYAML's safe loader; `at` is the node of the scalar that it read last."""

    at: Any = None

    def construct_scalar(self, node: Any) -> Any:
        """Return the text of a scalar, and keep the node in `at`."""
        self.at = node
        return super().construct_scalar(node)


class ConfigLoader(PlainLoader):
    """YAML 1.1 without its surprises: 1e-5 is a number, not text; dates and 12:00:00 are text."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own way of holding them
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in _FAST.yaml_implicit_resolvers.items()
    }


_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9]+)[eE][-+]?[0-9]+$")
ConfigLoader.add_implicit_resolver(_FLOAT, _NUMBER, list("-+.0123456789"))


def _count(loader: Any, node: Any) -> int:
    """A whole number that fits a float; larger ones raise OverflowError."""
    value: int = _FAST.yaml_constructors[_INT](loader, node)
    if value.bit_length() >= sys.float_info.max_exp:
        raise OverflowError(value.bit_length())
    return value


def _or_text(read: Any) -> Any:
    """Wrap the constructor `read`: text with a colon stays text, where YAML 1.1 reads 12:00:00 as 43200."""
    return lambda loader, node: node.value if ":" in node.value else read(loader, node)


PlainLoader.add_constructor(_INT, _count)
for _tag in (_INT, _FLOAT):
    ConfigLoader.add_constructor(_tag, _or_text(PlainLoader.yaml_constructors[_tag]))


@dataclass(frozen=True)
class YamlFile:
    """A file and its name in messages."""

    path: Path
    label: str

    @cached_property
    def text(self) -> str:
        """The file's text. Raises ConfigError if it cannot be read."""
        try:
            return read_text(self.path)
        except (OSError, UnicodeDecodeError) as error:
            raise self.error(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None

    @cached_property
    def values(self) -> dict[str, Any]:
        """The mapping in the file, interpolations unresolved. Raises ConfigError if it is not one."""
        return self._parsed[0]

    @cached_property
    def lines(self) -> dict[str, int]:
        """Dotted key -> line, counted from 1; sections included."""
        return self._parsed[1]

    @cached_property
    def _parsed(self) -> tuple[dict[str, Any], dict[str, int]]:
        """(values by key, line of each dotted key). Raises the file's `error`."""
        try:
            tree, lines = read_yaml(self.text, ConfigLoader)
        except UnreadableYaml as error:
            raise self.error(f"is not valid YAML: {error}", error.line) from None
        if not isinstance(tree, dict | None):
            raise self.error("holds no mapping of keys", 1)
        return {str(key): value for key, value in (tree or {}).items()}, lines

    def error(self, what: str, line: int | None = None) -> ConfigError:
        """The error of the file, with the line if it is known."""
        place = str(self.path) if line is None else f"{self.path}:{line}"
        return ConfigError(Problem("PP-E115", f"{self.label} {what}", shown(self.path, line), place))


def shown(path: Path, line: int | None) -> str:
    """A command that shows the lines of a file around `line`, or without a line what is at `path`."""
    if line is None:
        return f"ls -ld {pasted(nearest_there(path))}"
    return f"sed -n {max(line - 1, 1)},{line + 2}p {pasted(path)}"


class UnreadableYaml(ValueError):
    """Why a text is not read as YAML, and the line, counted from 1."""

    def __init__(self, reason: object, line: int) -> None:
        self.line = line
        super().__init__(f"{reason} (line {line})")


def read_yaml(text: str, loader: Any = PlainLoader) -> tuple[Any, dict[str, int]]:
    """(the value of a text, dotted key -> line of its mappings). Raises UnreadableYaml, also for aliases that make an
    endless tree and for deeply nested lists, with which libyaml crashes."""
    reader, depth = loader(text), 0
    try:
        for values, event in enumerate(yaml.parse(text, loader)):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            _check_size(values, depth, event)
        root = reader.get_single_node()
        lines = {} if root is None else _lines_of(root)
        return None if root is None else reader.construct_document(root), lines
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise UnreadableYaml(error.problem, 1 if mark is None else mark.line + 1) from None
    except yaml.reader.ReaderError as error:
        raise UnreadableYaml(error.reason, text.count("\n", 0, error.position) + 1) from None
    except UnreadableYaml:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        # For a value that does not fit its tag, PyYAML may raise any exception.
        reason = f"{reader.at.value[:40]} is no {reader.at.tag.rpartition(':')[2]}"
        raise UnreadableYaml(reason, reader.at.start_mark.line + 1) from None


def _check_size(values: int, depth: int, at: Any) -> None:
    most = f"{MOST_VALUES} values" if values > MOST_VALUES else f"{DEEPEST} levels"
    if values > MOST_VALUES or depth > DEEPEST:
        raise UnreadableYaml(f"it has more than {most}, counting all that aliases repeat", at.start_mark.line + 1)


def _lines_of(root: Any) -> dict[str, int]:
    """Dotted key -> line. Raises UnreadableYaml for a key that occurs twice, and for aliases that make a large tree."""
    lines: dict[str, int] = {}
    waiting: list[tuple[Any, str | None, int]] = [(root, "", 0)]
    for values, (node, prefix, depth) in enumerate(waiting):  # which grows meanwhile
        _check_size(values, depth, node)
        if isinstance(node, yaml.SequenceNode):
            waiting += [(each, None, depth + 1) for each in node.value]
        elif isinstance(node, yaml.MappingNode):
            seen = set[str]()
            for key, value in node.value:
                line = key.start_mark.line + 1
                if not isinstance(key, yaml.ScalarNode):
                    raise UnreadableYaml("a key is no text", line)
                if key.value in seen:
                    raise UnreadableYaml(f"{key.value} occurs twice", line)
                seen.add(key.value)
                if key.tag == _MERGE:
                    merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
                    waiting += [(each, prefix, depth + 1) for each in merged]
                    continue
                name = None if prefix is None else f"{prefix}{key.value}"[:_LONGEST_KEY]
                if name is not None:
                    lines.setdefault(name, line)
                waiting.append((value, name and f"{name}.", depth + 1))
    return lines
