"""Files of settings that other systems read, as lists: a file's content says whose it is, and nothing of it runs."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.keys import keys, value_text
from ppctl.config.name_tables import AUTOMODEL, BRIDGE, MEGATRON, SYSTEMS, TORCHTITAN, tables
from ppctl.config.yaml_file import ConfigLoader, UnreadableYaml, YamlFile, read_yaml
from ppctl.errors import ConfigError, Problem, pasted

_MOST_SETTINGS = 20_000
_TOML = re.compile(r"\s*(#.*\s*)*\[{1,2}[\w.\-]+\]{1,2}\s*(#.*)?\n")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=([^\s()]*|\"[^\"\n]*\")\s*(?:#.*)?$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")
_NO_VALUE = re.compile(r"[();|&]+|\w+\+?=.*|\$\{?\w+\[.*", re.DOTALL)
"""Words of a shell script that end a flag's values."""


class FileSetting(NamedTuple):
    """One setting of a file."""

    name: str
    """With its section, as `training.seq_len`; a flag with its dashes."""
    value: Any
    """Plain data; of a flag the text, or the list of texts, behind it."""
    place: str
    """The file, and the line where it is known."""

    @property
    def text(self) -> str:
        """The value as the command line takes it."""
        return value_text(self.value)


def settings_of(path: Path, system: str | None = None) -> tuple[str, list[FileSetting]]:
    """The format of a file, recognised by its content unless `system` names it, and its settings in order.

    Raises ConfigError (PP-E115) for a file that cannot be read or is nobody's, and for a Python file.
    """
    file = YamlFile(path, str(path))
    if path.suffix == ".py":
        message = (
            f"{path} is a program, which ppctl does not run: give the config that it prints. torchtitan writes it by "
            "--debug.save_config_file config.json, Megatron-Bridge as run_config.yaml into every checkpoint"
        )
        raise ConfigError(Problem("PP-E115", message, "ppctl plan --from outputs/config.json", str(path)))
    text = file.text
    try:
        tree, lines = _tree(text, system)
        tree = tree.get("ConfigContainer", tree) if isinstance(tree, dict) else {}
        settings = list(_leaves(tree, str(path), lines))
        found = system or _recognised(text, [setting.name for setting in settings])
        if found == MEGATRON:
            settings = _flags(text, tree.get("MODEL_ARGS"), str(path))
    except (ValueError, RecursionError) as error:
        raise file.error(f"cannot be read: {str(error) or 'it is nested too deeply'}") from None
    if found is None:
        message = f"{path} is not recognised as {', '.join(SYSTEMS.values())}, or is a recipe of ppctl's own"
        raise ConfigError(Problem("PP-E115", message, pasted("ppctl", "plan", path), str(path)))
    if not 0 < len(settings) <= _MOST_SETTINGS:
        raise file.error(f"has {len(settings)} settings of {SYSTEMS[found]}, and may have 1 to {_MOST_SETTINGS}")
    return found, settings


def _tree(text: str, system: str | None) -> tuple[Any, dict[str, int]]:
    """The plain data in a text and the lines of its keys; None for text with flags that is none of JSON, TOML, YAML."""
    if text.lstrip()[:1] == "{":
        return json.loads(text), {}
    if _TOML.match(text):
        return tomllib.loads(text), {}
    try:
        return read_yaml(text, ConfigLoader)
    except UnreadableYaml:
        if system in (AUTOMODEL, BRIDGE) or not _FLAG.search(text):
            raise
        return None, {}


def _recognised(text: str, names: list[str]) -> str | None:
    """The system in whose tables most sections of a file stand; Megatron's for a text with flags alone."""
    sections = {name.partition(".")[0] for name in names}
    if "MODEL_ARGS" in sections or not names:
        return MEGATRON if _FLAG.search(text) else None
    scores = {system: len(sections & tables(system).sections) for system in (TORCHTITAN, AUTOMODEL, BRIDGE)}
    best = max(scores, key=lambda system: scores[system])
    return best if scores[best] and not all(name in keys() for name in names) else None


def _leaves(tree: Mapping[Any, Any], path: str, lines: Mapping[str, int], prefix: str = "") -> Iterator[FileSetting]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        groups = isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value)
        if groups or (isinstance(value, Mapping) and value):
            yield from _leaves(dict(enumerate(value)) if groups else value, path, lines, f"{name}.")
        else:
            yield FileSetting(name, value, f"{path}:{lines[name]}" if name in lines else path)


def _flags(text: str, arguments: Mapping[Any, Any] | None, path: str) -> list[FileSetting]:
    """Megatron's flags in a shell script, a list of flags, or the MODEL_ARGS of a YAML file."""
    if arguments is not None:
        given = [(str(flag), value) for flag, value in arguments.items() if value is not False]
        return [FileSetting(flag, [] if value is True else value_text(value), path) for flag, value in given]
    found: list[tuple[str, list[str]]] = []
    is_open = False
    for word in _words(text):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:3].isalpha():
            found.append((name, [value] if equals else []))
            is_open = not equals
        elif is_open and not _NO_VALUE.fullmatch(word):
            found[-1][1].append(word)
        else:
            is_open = False
    return [FileSetting(name, values[0] if len(values) == 1 else values, path) for name, values in found]


def _words(script: str) -> list[str]:
    variables: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(script):
        variables.setdefault(name, set()).add(value.strip("\"'"))
    lexer = shlex.shlex(script.replace("\\\n", " "), posix=True, punctuation_chars="();|&")
    lexer.whitespace_split = True
    words = [_expanded(word, variables) for word in lexer]
    # In a script's array a quoted flag and its value are one word.
    return [part.strip("'\"") for word in words for part in (word.split() if word.startswith("--") else [word])]


def _expanded(word: str, variables: Mapping[str, set[str]]) -> str:
    """`word` with the shell variables that the file sets to one value, or gives a default; others stay as they are."""

    def value(found: re.Match[str]) -> str:
        given = variables.get(found[1], set())
        if len(given) == 1:
            others = {name: values for name, values in variables.items() if name != found[1]}
            return _expanded(next(iter(given)), others)
        return found[0] if given or found[2] is None else found[2].strip("\"'")

    return _VARIABLE.sub(value, word)
