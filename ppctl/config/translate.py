"""From another system's file to overrides: every setting is translated, left out with a reason, or not carried over.

A file's content says whose it is, and nothing of it runs.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from ppctl.config.argv import LAYOUT, PLACE, Arguments, quote, unquoted
from ppctl.config.flags import TAKEN, TranslatedFlag, defaults_left, takes_several, translated, valueless
from ppctl.config.keys import keys, keys_with, mapping_with, names_of_keys, text_keys, value_text
from ppctl.config.metadata import OneOf
from ppctl.config.name_tables import (
    AUTOMODEL,
    BRIDGE,
    DEFAULTS,
    MEGATRON,
    OFF,
    SAME,
    SYSTEMS,
    TORCHTITAN,
    NameTables,
    overrides_of,
    tables,
)
from ppctl.config.other_systems import DP, JOINT, NO_MODEL, NOTHING, Given, Said
from ppctl.config.yaml_file import ConfigLoader, UnreadableYaml, YamlFile, read_yaml, shown
from ppctl.errors import ConfigError, Problem, pasted

_MOST_SETTINGS = 20_000
_TOML = re.compile(r"\s*(#.*\s*)*\[{1,2}[\w.\-]+\]{1,2}\s*(#.*)?\n")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]")
_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=([^\s()]*|\"[^\"\n]*\")\s*(?:#.*)?$", re.MULTILINE)
_VARIABLE = re.compile(r"\$\{?(\w+)(?::?-([^}]*))?\}?")
_NO_VALUE = re.compile(r"[();|&]+|\w+\+?=.*|\$\{?\w+\[.*", re.DOTALL)
"""Words of a shell script that end a flag's values."""
_OF_A_RECIPE = re.compile(r"(defaults|published)(\.|$)")
"""Names that recipes of ppctl have beside keys."""


class FileSetting(NamedTuple):
    """One setting of a file."""

    name: str
    """With its section, as `training.seq_len`; a flag with its dashes."""
    value: Any
    """Plain data; for a flag, the text or the list of texts after it."""
    place: str
    """The file, and the line where it is known."""

    @property
    def text(self) -> str:
        """The value as the command line takes it."""
        return value_text(self.value)


def settings_of(path: Path, system: str | None = None) -> tuple[str, list[FileSetting]]:
    """(the format of a file, recognised by its content unless `system` names it; its settings in order).

    Raises ConfigError (PP-E115) for a file that cannot be read or recognised, and for a Python file.
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
        message = f"{path} is not recognised as one of {', '.join(SYSTEMS.values())}; it may be a recipe of ppctl's own"
        raise ConfigError(Problem("PP-E115", message, pasted("ppctl", "plan", path), str(path)))
    if not 0 < len(settings) <= _MOST_SETTINGS:
        raise file.error(f"has {len(settings)} settings of {SYSTEMS[found]}, but may have only 1 to {_MOST_SETTINGS}")
    return found, settings


def _tree(text: str, system: str | None) -> tuple[Any, dict[str, int]]:
    """(the plain data in a text, the lines of its keys); data is None for flags that are not JSON, TOML or YAML."""
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
    """The system whose tables have most sections of a file; Megatron for mere flags; None for recipes and the rest."""
    sections = {name.partition(".")[0] for name in names}
    if "MODEL_ARGS" in sections or not names:
        return MEGATRON if _FLAG.search(text) else None
    scores = {system: len(sections & tables(system).sections) for system in (TORCHTITAN, AUTOMODEL, BRIDGE)}
    best = max(scores, key=lambda system: scores[system])
    own = all(name in keys() or mapping_with(name) or _OF_A_RECIPE.match(name) for name in names)
    return None if own or not scores[best] else best


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
    # In a shell array a quoted flag and its value are one word.
    return [part.strip("'\"") for word in words for part in (word.split() if word.startswith("--") else [word])]


def _expanded(word: str, variables: Mapping[str, set[str]]) -> str:
    """`word` with the values of shell variables that the file sets once or gives a default; others stay."""

    def value(found: re.Match[str]) -> str:
        given = variables.get(found[1], set())
        if len(given) == 1:
            others = {name: values for name, values in variables.items() if name != found[1]}
            return _expanded(next(iter(given)), others)
        return found[0] if given or found[2] is None else found[2].strip("\"'")

    return _VARIABLE.sub(value, word)


VOCABULARY_ALONE = "a plan needs only the vocabulary, which the command line sets; to train, type data.tokenizer=DIR"
"""Why a tokenizer that the shell alone knows may be missing."""
_ROWS, _BYTES = "model.vocab_size", text_keys()["model.vocab_size"].default
_BATCH, _MICRO = "train.global_batch_size", "train.micro_batch_size"
_SP, _TP = "parallel.sequence_parallel", "parallel.tensor_model_parallel_size"
_EVALUATES, _ITS_DATA = ("train.eval_interval", "train.eval_steps"), {"data.validation_path", "data.validation_split"}
_OWN_SECTIONS = ("model.", "parallel.", "optim.")
"""Our sections whose fields have Megatron's names and meanings."""
_OFF = TranslatedFlag("", why="off, or always so in ppctl", code=NOTHING)
_NO_DATA = TranslatedFlag("", why=f"an evaluation needs {' or '.join(sorted(_ITS_DATA))}", code=NOTHING)
_UNKNOWN = TranslatedFlag("", why="no table of ppctl's has it")


class Translation(NamedTuple):
    """A file's settings in ppctl's words."""

    system: str
    rows: list[TranslatedFlag]
    line: Arguments
    """The command line, with the file's overrides before the typed words."""
    notes: list[str]

    @property
    def lost(self) -> list[TranslatedFlag]:
        """The settings whose effect a run of ppctl would not have."""
        return [row for row in self.rows if not row.override and row.code != NOTHING]


def translation(path: Path, system: str | None, line: Arguments, num_layers: int | None) -> Translation:
    """The translation of a file, below the stronger words of a command line; `num_layers` is that of the model that the
    line names, if it names one. Raises ConfigError for a file that cannot be read."""
    found, settings = settings_of(path, system)
    if found == AUTOMODEL:  # older files have a separate section for the pipeline
        renamed = (each.name.replace("autopipeline.", "distributed.pipeline.") for each in settings)
        settings = [each._replace(name=name) for each, name in zip(settings, renamed, strict=True)]
    pairs = (override.partition("=") for override in line.overrides)
    typed = {key: unquoted(text) if text[:1] in ("'", '"') else text for key, _, text in pairs}
    values = {setting.name: setting.value for setting in settings}
    given = Given(values, typed, num_layers, tables(found))
    try:
        rows = list((_of_flags if found == MEGATRON else _of_tree)(found, settings, given, str(path)))
    except ConfigError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        message = f"{path} has a value of another kind than its setting takes: {error}"
        raise ConfigError(Problem("PP-E115", message, shown(path, None), str(path))) from None
    if not _ITS_DATA & {*typed, *(key for row in rows for key, _ in row.pairs)}:
        rows = [_NO_DATA._replace(typed=row.typed) if {*dict(row.pairs)} & {*_EVALUATES} else row for row in rows]
    ours = {key: (quote(key, text), f"{row.place} ({row.shown()})") for row in rows for key, text in row.pairs}
    follows = {"model.num_layers", "parallel.pipeline_model_parallel_size"} if found in JOINT else set()
    notes, sizes = [], [key for key in keys_with("layout") if key in typed and key not in follows]
    if sizes and LAYOUT in ours and LAYOUT not in typed:
        notes.append(f"layout {ours.pop(LAYOUT)[0]} set aside because {' and '.join(sizes)} was typed")
    sources = {key: place if key not in typed else f"{PLACE}, replacing {place}" for key, (_, place) in ours.items()}
    overrides = [f"{key}={text}" for key, (text, _) in ours.items() if key not in typed]
    merged = replace(line, overrides=[*overrides, *line.overrides], sources={**sources, **line.sources})
    return Translation(found, rows, merged, notes)


# Sections and keys


def _of_tree(system: str, settings: Sequence[FileSetting], given: Given, path: str) -> Iterator[TranslatedFlag]:
    """The rows of torchtitan's, Automodel's or Bridge's settings."""
    named = {setting.name: setting for setting in settings}
    done, said_keys = set[str](), set[str]()
    for said in JOINT.get(system, _bridges_model)(given):
        done.update(said.names)
        said_keys.update(key for key, _ in said.overrides)
        typed = " ".join(
            f"{name}={named[name].text}" if name in named else f"{name} (not given)" for name in said.names
        )
        place = next((named[name].place for name in said.names if name in named), path)
        if said.overrides or said.code != NOTHING or any(name in named for name in said.names):
            yield TranslatedFlag(typed, _pasted(said.overrides), said.why, said.code, place)
    usual = {} if "model_spec.name" in named else given.tables.entries.get(DEFAULTS, {})
    for setting in (*settings, *(FileSetting(name, text, path) for name, text in usual.items())):
        if setting.name not in done:
            done.add(setting.name)
            row = of_key(given.tables, setting.name, setting.text)
            row = row or (_of_bridge(setting.name, setting.text) if system == BRIDGE else None)
            row = row or (_OFF if setting.text == "null" else _UNKNOWN)
            unsaid = setting.name not in named
            if not (unsaid and said_keys & {*dict(row.pairs)}):
                said_keys.update(key for key, _ in row.pairs)
                typed = f"{setting.name}={setting.text}{' (its default)' * unsaid}"
                yield row._replace(typed=typed, place=setting.place)


def _pasted(pairs: Sequence[tuple[str, str]]) -> str:
    return pasted(*(f"{key}={text}" for key, text in pairs))


def of_key(table: NameTables, name: str, text: str) -> TranslatedFlag | None:
    """The meaning of a setting by its system's page; None if the page does not have it."""
    entry, row = table.entry(SAME, name), valueless(table, name, "")
    if entry is None and row is None:
        return None
    is_off = text in ("null", "") or (entry is None and text.lower() in OFF and name not in table.idle)
    if is_off or table.is_idle(name, text):
        return _OFF
    pairs = overrides_of(entry, text) if entry else []
    if pairs and all(_takes(key, value) for key, value in pairs):
        return TranslatedFlag("", _pasted(pairs), (entry or "").partition(" -- ")[2])
    return row or TranslatedFlag("", why=f"{pairs[0][0]} has no such value", code="PP-E108")


def _takes(name: str, text: str) -> bool:
    key = text_keys()[name]
    if key.is_switch:
        return text.lower() in ("true", "false")
    return not isinstance(key.limit, OneOf) or key.allows(None if text == "null" else text)


def _bridges_model(given: Given) -> Iterator[Said]:
    """Yield the problem of a file that names no model, such as one that only changes a recipe."""
    if "model.num_layers" not in given.values and not given.names_model:
        why = "the recipe that this file changes says it, in Python: type model=NAME, or model.from=DIR"
        yield Said(("model.num_layers",), (), why, NO_MODEL)


def _of_bridge(name: str, text: str) -> TranslatedFlag | None:
    """The meaning of the Megatron flag with the last part of a setting's name."""
    flag = "--" + name.rpartition(".")[2].replace("_", "-")
    values = [] if text == "true" else text.strip("[]").split(",") if text[:1] == "[" else [text]
    row = _of_flag(flag, values, "")
    listed = flag in names_of_keys("names") or flag in names_of_keys("known_as")
    if row is None or not (listed or all(key.startswith(_OWN_SECTIONS) for key, _ in row.pairs)):
        return None
    fixed = tables(MEGATRON).entry(SAME, flag)
    return _OFF if text == "null" or (text.lower() in OFF and (fixed or not row.override)) else row


# Flags


def _of_flags(system: str, settings: Sequence[FileSetting], given: Given, path: str) -> Iterator[TranslatedFlag]:
    """The rows of Megatron's flags, and of Megatron's defaults that differ from ours."""
    grows, typed = "--rampup-batch-size" in given.values, given.typed
    batch = "" if grows else str(given.get("--global-batch-size", ""))
    said = dict(typed)
    for setting in settings:
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        row = _of_flag(setting.name.replace("_", "-"), values, batch) or _UNKNOWN
        unread = [key for key, text in row.pairs if "$" in text]
        if unread and all(key in typed for key in unread):
            row = TranslatedFlag("", why="the command line says it", code=NOTHING)
        elif unread == ["data.tokenizer"] and _ROWS in typed:
            row = TranslatedFlag("", why=VOCABULARY_ALONE, code=NOTHING)
        elif unread:
            sized = given.names_model or _ROWS in {*typed, *said} or "--vocab-size" in given.values
            row = _of_the_shell(unread[0], sized=sized)
        elif row.pairs == [(_SP, "true")] and typed.get(_TP, given.get("--tensor-model-parallel-size", "1")) == "1":
            row = TranslatedFlag("", why="Megatron switches it off, too, where tp is 1", code=NOTHING)
        row = row.without(said)
        said |= dict(row.pairs)
        yield row._replace(typed=pasted(setting.name, *values), place=setting.place)
    micro, dp = said.get(_MICRO, "1"), typed.get(DP, "1")
    if _BATCH not in said and micro.isdigit() and dp.isdigit():
        batch = f"{_BATCH}={int(micro) * int(dp)}"
        yield TranslatedFlag(f"{_BATCH} (not given)", batch, "Megatron's is micro_batch_size x dp", place=path)
    for key, theirs in defaults_left(said):
        if not (given.names_model and key.startswith("model.")):
            yield TranslatedFlag(f"{key} (not given)", pasted(f"{key}={theirs}"), "Megatron's default", place=path)


def _of_the_shell(key: str, *, sized: bool) -> TranslatedFlag:
    """The answer to a value that stands in a shell variable; a tokenizer gives the plan its vocabulary unless it is
    `sized` otherwise."""
    why = f"only the shell that runs the script knows this value: type {key}=..."
    if key == "data.tokenizer" and not sized:
        why = why.replace("...", f"DIR, or {_ROWS}=N to plan; until then it is that of bytes ({_BYTES}, rounded up)")
    return TranslatedFlag("", why=why)


def _of_flag(flag: str, values: Sequence[str], batch: str) -> TranslatedFlag | None:
    """The meaning of one flag with as many of the words after it as it takes; None for an unknown flag."""
    if flag in TAKEN and not values and not TAKEN[flag].is_switch:
        return TranslatedFlag("", why=f"{flag} needs a value")
    is_list = takes_several(flag) and len(values) > (0 if flag in TAKEN else 1)
    return translated(flag, f"[{','.join(values)}]" if is_list else "".join(values[:1]), batch)
