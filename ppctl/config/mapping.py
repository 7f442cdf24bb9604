"""A RunConfig as plain data and back: typed, closed, and with every problem collected.

The launcher writes `to_mapping` as config.yaml, every rank reads it with `from_mapping`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Literal, get_args, get_origin

from ppctl.config.keys import (
    keys,
    mapping_with,
    members,
    names_of_keys,
    nearest,
    sections,
    text_keys,
    type_text,
    value_text,
)
from ppctl.config.model_parallel_config import dtype_name
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem

PUBLISHED = frozenset({"what", "published", "here", "why"})
MOST_UNKNOWN = 20
"""The most unknown keys that are reported one by one, since each is compared with every key."""


def to_values(config: RunConfig) -> dict[str, Any]:
    """Dotted key -> plain data (dict, list, str, int, float, bool, None), for every key that text can set."""
    return {
        name: dtype_name(config[name]) if key.is_dtype else _plain(config[name]) for name, key in text_keys().items()
    }


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys as a tree of sections."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, field = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[field] = value
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) down to the schema's leaves; an unknown name below a section counts as a leaf."""
    for name, value in tree.items():
        full = f"{prefix}{name}"
        if isinstance(value, Mapping) and full in sections():
            yield from leaves(value, f"{full}.")
        elif not (value is None and full in sections()):
            owner = None if full in keys() else mapping_with(full)
            yield (full, value) if owner is None else (owner, {full.rpartition(".")[2]: value})


def key_called(name: str) -> str:
    """The key of which a file's dotted `name` is another name; other names unchanged."""
    return names_of_keys("names").get(name, name) if "." in name else name


def to_mapping(config: RunConfig) -> dict[str, Any]:
    """Nested plain data that `from_mapping` reads back to an equal config."""
    return nested(to_values(config))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def from_mapping(
    mapping: Mapping[str, Any],
    place: Callable[[str], str] = lambda key: key,
    remedy: Callable[[str], str] = lambda key: "",
) -> RunConfig:
    """The config that `mapping` describes; missing keys keep their defaults.

    `place` maps a dotted key to the source of its value, `remedy` to the remedy for a value of a wrong type. `mapping`
    may use another of a key's dotted names, as files of earlier versions do. Raises ConfigError with every unknown key
    and wrong type.
    """
    values = {key_called(name): value for name, value in leaves(mapping)}
    config, problems = convert(values, place, remedy)
    if problems:
        raise ConfigError(problems)
    return config


def convert(
    values: Mapping[str, Any], place: Callable[[str], str], remedy: Callable[[str], str] = lambda key: ""
) -> tuple[RunConfig, list[Problem]]:
    """The config that values by dotted key describe, and their problems; a key with a problem keeps its default."""
    config = RunConfig()
    problems = [not_a_section(name, place(name)) for name in values if name in sections()]
    unknown: list[str] = []
    for name, value in values.items():
        key = keys().get(name)
        if name in sections():
            continue
        if key is None:
            unknown.append(name)
            if len(unknown) <= MOST_UNKNOWN:
                problems.append(unknown_key(name, place(name)))
        elif key.is_callable:
            message = f"{name} takes a Python object, which only a program that calls the API can give; leave it out"
            problems.append(Problem("PP-E113", message, place=place(name)))
        else:
            try:
                config[name] = converted_value(name, value)
            except ValueError as error:
                problems.append(Problem("PP-E102", f"{name}: {error}", remedy(name), place(name)))
    if unknown[MOST_UNKNOWN:]:
        message = f"there are {len(unknown) - MOST_UNKNOWN} more names that are no keys"
        problems.append(Problem("PP-E101", message, "ppctl explain", place(unknown[MOST_UNKNOWN])))
    return config, problems


def unknown_key(name: str, place: str, close: Sequence[str] | None = None, remedy: str = "") -> Problem:
    """The problem of a key that does not exist; `close` are similar names, best first."""
    close = nearest(name, text_keys()) if close is None else close
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    remedy = remedy or " ".join(["ppctl explain", *close[:1]])
    return Problem("PP-E101", f"there is no key {name}{hint}", remedy, place)


def not_a_section(name: str, place: str) -> Problem:
    """The problem of one value for a whole section."""
    message = f"{name} is a section, not a value: set its keys, as {name}.KEY=VALUE"
    return Problem("PP-E102", message, f"ppctl explain {name}", place)


def converted_value(name: str, value: Any) -> Any:
    """`value` as the type of the dotted key `name`. Raises ValueError that says what the key takes."""
    read = _reader(name)
    return read(value)


@cache
def _reader(name: str) -> Callable[[Any], Any]:
    key = keys()[name]
    special = {"published": _published, "model.hf_overrides": _fields_of_config_json}
    if key.name in special:
        return special[key.name]
    if key.is_dtype:
        return dtype_name
    return _plain if key.type is Any else partial(_as_one_of, key.type)


def _as_one_of(kind: Any, value: Any) -> Any:
    for member in members(kind):
        try:
            return _as(member, value)
        except (ValueError, TypeError, OverflowError):
            continue
    raise ValueError(f"takes {type_text(kind)}, not {repr(value) if isinstance(value, str) else value_text(value)}")


def _fields_of_config_json(value: Any) -> Any:
    """Convert `model.hf_overrides`; a field set to null is kept, as the text `null`."""
    if isinstance(value, Mapping):
        value = {name: "null" if each is None else each for name, each in value.items()}
    return _as_one_of(keys()["model.hf_overrides"].type, value)


def _as(kind: Any, value: Any) -> Any:
    """`value` converted to `kind`. Raises ValueError, TypeError or OverflowError for a value that is not of it."""
    if kind is type(None):
        if value is None:
            return None
    elif get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
    elif get_origin(kind) is list and isinstance(value, list | tuple):
        return [_as(get_args(kind)[0], item) for item in value]
    elif get_origin(kind) is dict and isinstance(value, Mapping):
        convert = _text if get_args(kind)[1] is str else _plain
        return {str(k): convert(v) for k, v in value.items()}
    elif kind is Any:
        return _plain(value)
    elif kind in _SCALARS:
        return _SCALARS[kind](value)
    raise ValueError(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(value)


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise ValueError(value)
    if isinstance(value, str):
        value = float(value) if not value.lstrip("+-").isdecimal() else int(value)
    if isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return int(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise ValueError(value)
    return float(value)


def _bool(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ValueError(value)


_SCALARS: dict[Any, Callable[[Any], Any]] = {int: _int, float: _float, bool: _bool, str: _text}


def _published(value: Any) -> list[dict[str, str]]:
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(row, Mapping) and set(row) == PUBLISHED for row in rows):
        raise ValueError("takes a list of rows, each with the fields what, published, here and why")
    return [{field: _text(row[field]) for field in ("what", "published", "here", "why")} for row in rows]
