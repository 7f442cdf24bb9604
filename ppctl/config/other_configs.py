"""Files of settings that other systems read, as a list of settings: Megatron's flags, torchtitan's TOML and JSON, NeMo
Automodel's and Megatron-Bridge's YAML. They are read, never run; `settings_of` finds out whose a file is.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.keys import value_text
from ppctl.config.yaml_file import ConfigLoader, UnreadableYaml, YamlFile, read_yaml
from ppctl.errors import ConfigError, Problem, pasted

MEGATRON, AUTOMODEL, TORCHTITAN, BRIDGE = "megatron", "automodel", "torchtitan", "bridge"
SYSTEMS = {
    MEGATRON: "Megatron-LM's flags",
    AUTOMODEL: "NeMo Automodel's YAML",
    TORCHTITAN: "torchtitan's TOML or JSON",
    BRIDGE: "Megatron-Bridge's YAML",
}
"""Format -> what it is."""

_SECTIONS = {
    AUTOMODEL: "step_scheduler distributed dist_env packed_sequence loss_fn recipe dataloader clip_grad_norm peft",
    TORCHTITAN: "parallelism training lr_scheduler activation_checkpoint metrics job debug comm model_spec validator",
    BRIDGE: "train scheduler logger ddp dist rng mixed_precision tokenizer validation ConfigContainer comm_overlap",
    "ppctl": "parallel pipeline optim data launch log cost",
}
"""Sections by which a tree is recognised."""

_MOST_SETTINGS = 20_000
_TOML = re.compile(r"^\s*\[{1,2}[\w.\-]+\]{1,2}\s*(#.*)?$", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]", re.MULTILINE)
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=([^\s()]*|\"[^\"\n]*\")\s*(?:#.*)?$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")


class Setting(NamedTuple):
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


def settings_of(path: Path, system: str | None = None) -> tuple[str, list[Setting]]:
    """The format of a file, recognised by its content unless `system` names it, and its settings in order.

    Raises ConfigError (PP-E115) for a file that cannot be read or is nobody's, and for a Python file.
    """
    file = YamlFile(path, str(path))
    if path.suffix == ".py":
        raise _python(file)
    text = file.text
    try:
        tree, lines = _tree(text, system)
        found = system or _recognised(text, tree)
        if found is None or found == "ppctl":
            raise _nobodys(file, found)
        if found != MEGATRON and not isinstance(tree, dict):
            raise file.error(f"holds no settings of {SYSTEMS[found]}")
        flags = found == MEGATRON
        settings = (
            _flags(text, tree, str(path)) if flags else _leaves(tree.get("ConfigContainer", tree), str(path), lines)
        )
        kept = list(islice(settings, _MOST_SETTINGS + 1))
    except (ValueError, RecursionError) as error:
        raise file.error(f"cannot be read: {str(error) or 'it is nested too deeply'}") from None
    if len(kept) > _MOST_SETTINGS:
        raise file.error(f"has more than {_MOST_SETTINGS} settings")
    return found, kept


def _python(file: YamlFile) -> ConfigError:
    message = (
        f"{file.label} is a program, which ppctl does not run: give the config that it prints. torchtitan writes it by "
        "--debug.save_config_file config.json, Megatron-Bridge as run_config.yaml into every checkpoint"
    )
    return ConfigError(Problem("PP-E115", message, "ppctl plan --from outputs/config.json", file.label))


def _nobodys(file: YamlFile, found: str | None) -> ConfigError:
    if found:
        message, remedy = f"{file.label} is a recipe of ppctl's own", pasted("ppctl", "plan", file.label)
    else:
        message = f"{file.label} is not recognised as {', '.join(SYSTEMS.values())}"
        remedy = pasted("ppctl", "plan", "--from", file.label, "--from-format", MEGATRON)
    return ConfigError(Problem("PP-E115", message, remedy, file.label))


def _tree(text: str, system: str | None) -> tuple[Any, dict[str, int]]:
    """The plain data in a text and the lines of its keys; None for text that is none of JSON, TOML and YAML."""
    if text.lstrip()[:1] == "{":
        return json.loads(text), {}
    first = _TOML.search(text)
    if first is not None and "=" not in re.sub(r"#.*", "", text[: first.start()]).replace("\n", ""):
        return tomllib.loads(text), {}
    try:
        return read_yaml(text, ConfigLoader)
    except UnreadableYaml:
        if system in (AUTOMODEL, BRIDGE) or not _FLAG.search(text):
            raise
        return None, {}


def _recognised(text: str, tree: Any) -> str | None:
    """The system whose sections a tree has most of; Megatron's for a text with flags."""
    if not isinstance(tree, dict) or "MODEL_ARGS" in tree:
        return MEGATRON if _FLAG.search(text) else None
    sections = set(map(str, tree.get("ConfigContainer", tree))) | set(tree)
    scores = {system: len(sections & set(names.split())) for system, names in _SECTIONS.items()}
    best = max(scores, key=lambda system: scores[system])
    return best if scores[best] else None


def _leaves(tree: Mapping[Any, Any], path: str, lines: Mapping[str, int], prefix: str = "") -> Iterator[Setting]:
    for key, value in tree.items():
        name = f"{prefix}{key}"
        groups = isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value)
        if groups or (isinstance(value, Mapping) and value):
            inner = dict(enumerate(value)) if groups else value
            yield from _leaves(inner, path, lines, f"{name}.")
        else:
            yield Setting(name, value, f"{path}:{lines[name]}" if name in lines else path)


# Megatron's flags, in a shell script, a list of flags, or the MODEL_ARGS of a YAML file


def _flag_words(text: str, tree: Any) -> list[str]:
    if isinstance(tree, dict):
        given = [(str(flag), value) for flag, value in tree["MODEL_ARGS"].items() if value is not False]
        return [word for flag, value in given for word in (flag, *(() if value is True else [value_text(value)]))]
    variables: dict[str, set[str]] = {}
    for name, value in _ASSIGNED.findall(text):
        variables.setdefault(name, set()).add(value.strip("\"'"))
    lexer = shlex.shlex(text.replace("\\\n", " "), posix=True, punctuation_chars="();|&")
    lexer.whitespace_split = True
    words = [_expanded(word, variables) for word in lexer]
    # In a script's array a quoted flag and its value are one word.
    return [part.strip("'\"") for word in words for part in (word.split() if word.startswith("--") else [word])]


def _expanded(word: str, variables: Mapping[str, set[str]]) -> str:
    """`word` with the shell variables that the file sets to one value; others stay as they are."""

    def value(found: re.Match[str]) -> str:
        given = variables.get(found[1], set())
        if len(given) == 1:
            others = {name: values for name, values in variables.items() if name != found[1]}
            return _expanded(next(iter(given)), others)
        return found[0] if given or found[2] is None else found[2].strip("\"'")

    return _VARIABLE.sub(value, word)


def _flags(text: str, tree: Any, path: str) -> Iterator[Setting]:
    found: list[tuple[str, list[str]]] = []
    is_open = False
    for word in _flag_words(text, tree):
        name, equals, value = word.partition("=")
        if name.startswith("--") and name[2:3].isalpha():
            found.append((name, [value] if equals else []))
            is_open = not equals
        elif is_open and not re.fullmatch(r"[();|&]+|\w+\+?=.*|\$\{?\w+\[.*", word, re.DOTALL):
            found[-1][1].append(word)
        else:
            is_open = False
    return (Setting(name, values[0] if len(values) == 1 else values, path) for name, values in found)
