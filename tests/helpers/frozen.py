"""What users rely on, as it was frozen in tests/golden/frozen.json: additions are free, all else breaks users.

Knows the file and what counts as a break. Must not know where ppctl keeps what it holds: a test looks, and asks here.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

GOLDEN = Path(__file__).parents[1] / "golden" / "frozen.json"
IS_WRITTEN = os.environ.get("PPCTL_GOLDEN") == "write"
"""Whether `make golden` runs: then what there is now is what is frozen."""
WIDTH = 120

HEAD = """\
This breaks users: what follows was frozen in tests/golden/frozen.json (section "{section}"), and is gone or changed.
Put it back. Additions are free. Where a decision in docs/decisions says that users are to be broken, `make golden`."""


def frozen(section: str) -> Any:
    """What one section holds; an empty mapping before it is written for the first time."""
    return _everything().get(section, {})


def hold(section: str, now: Any, *, exact: bool = False) -> None:
    """Fail, naming everything that went or changed since `section` was frozen; with `exact`, what is new as well."""
    if IS_WRITTEN:
        _write(section, now)
    found = list(breaks(frozen(section), now))
    if exact:
        found += [line.replace(" is gone", " is new, and nothing may be") for line in breaks(now, frozen(section))]
    if not frozen(section):
        found.append("nothing is frozen: `make golden` writes it")
    if found:
        _fail(section, found)


def breaks(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """One line for each part of `before` that `now` lacks: mappings by key, lists as sets, all else as it is."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name, value in before.items():
            here = f"{place} > {name}" if place else name
            if name in now:
                yield from breaks(value, now[name], here)
            else:
                yield f"{here} is gone"
    elif isinstance(before, list) and isinstance(now, list):
        there = f"; there is {', '.join(map(str, now))}" if len(now) < 8 else ""
        yield from (f"{place}: {item} is gone{there}" for item in before if item not in now)
    elif before != now or isinstance(before, bool) != isinstance(now, bool):
        yield f"{place} was {before!r} and is {now!r}"


def hold_calls(section: str, now: dict[str, Any]) -> None:
    """`hold` for signatures: one addition breaks every call, a new parameter without a default."""
    hold(section, now)
    if needed := list(demands(frozen(section), now)):
        _fail(section, needed)


def demands(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """One line for each parameter that calls of `before` do not pass and must pass `now`."""
    for name, known in before.items():
        for parameter, what in now[name].items():
            if parameter not in known and "default" not in what and not parameter.startswith("*"):
                yield f"{name}: its new parameter {parameter} has no default"


def _fail(section: str, found: Iterable[str]) -> None:
    lines = [HEAD.format(section=section), *(f"  {line}" for line in dict.fromkeys(found))]
    pytest.fail("\n".join(lines), pytrace=False)


def signature(function: Callable[..., Any]) -> dict[str, Any]:
    """Parameter -> its position, where it can be passed by position, and its default, where it has one."""
    found: dict[str, Any] = {}
    for position, parameter in enumerate(inspect.signature(function).parameters.values()):
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        what: dict[str, Any] = {}
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            what["position"] = position
        if parameter.default is not parameter.empty:
            what["default"] = repr(parameter.default)
        found[stars + parameter.name] = what
    return found


def members(cls: type, *left_out: str) -> dict[str, Any]:
    """A class's constructor and its public members: methods with their parameters, and the rest by name alone.

    The fields of a dataclass are parameters of its constructor; nobody counts on which of sixty comes where.
    """
    parameters = signature(cls)
    if is_dataclass(cls):
        parameters = {name: {"default": what.get("default", "")} for name, what in parameters.items()}
    found: dict[str, Any] = {cls.__name__: parameters}
    for name in dir(cls):
        if name.startswith("_") or name in left_out or (is_dataclass(cls) and name in parameters):
            continue
        member = inspect.getattr_static(cls, name)
        function = getattr(cls, name) if isinstance(member, (staticmethod, classmethod)) else member
        found[f"{cls.__name__}.{name}"] = signature(function) if inspect.isroutine(function) else {}
    return found


def fields(value: Any, *maps: str) -> dict[str, list[str]]:
    """The path of every field of a JSON value -> the kinds of value in it (`a.b[].c` -> [`number`]).

    The keys of a mapping at one of the paths `maps` are names that nobody can rely on: they become `*`.
    """
    kinds: dict[str, set[str]] = {}

    def walk(inner: Any, path: str) -> None:
        kinds.setdefault(path, set()).add(_kind(inner))
        if isinstance(inner, dict):
            for key, value in inner.items():
                walk(value, f"{path}.{'*' if path in maps else key}".removeprefix("."))
        elif isinstance(inner, list):
            for item in inner:
                walk(item, f"{path}[]")

    walk(value, "")
    return {path: sorted(kind - {"null"}) for path, kind in sorted(kinds.items()) if path}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    return {str: "text", list: "list", dict: "object"}.get(type(value), "number")


def _write(section: str, now: Any) -> None:
    GOLDEN.write_text(_text(_everything() | {section: now}) + "\n")


def _everything() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return found


def _text(value: Any, indent: str = "") -> str:
    """JSON with one line for whatever fits into one, so that a difference shows what changed."""
    short = json.dumps(value, sort_keys=True)
    if not isinstance(value, (dict, list)) or (indent and len(indent + short) <= WIDTH - 30) or not value:
        return short
    inner = indent + " "
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {_text(value[key], inner)}" for key in sorted(value)]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    return "[\n" + ",\n".join(inner + _text(item, inner) for item in value) + f"\n{indent}]"
