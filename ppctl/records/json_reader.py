"""JSON from any writer, as values of declared types: every field's type, size and range is checked.

A type is an annotation: plain types, None, Literal, unions, tuples, lists and dicts of types, dataclasses, NamedTuples
(objects, or lists of their fields), TypedDicts, and classes with a `parse` of their text. `Annotated[type, rule]` adds
a rule: a range or a set that has the value, a pattern that it matches, or a function that raises ValueError. Keys that
an object's type does not declare are left out, or kept in a TypedDict: later versions may add some.
"""

from __future__ import annotations

import gc
import inspect
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

T = TypeVar("T")
_Read = Callable[[Any], Any]

Count = Annotated[int, range(2**53)]
"""A count, a number of bytes or an index, within the range of every JSON program."""
_LINE = re.compile(r"[^\x00-\x1f\x7f-\x9f\u2028\u2029]{0,4096}")
Line = Annotated[str, _LINE]
"""Text of one line, without control characters."""


class Fault(ValueError):
    """A rule that a value breaks, and the place of the value."""

    def __init__(self, rule: str, value: Any, place: tuple[str, ...] = ()) -> None:
        self.rule, self.value, self.place = rule, value, place
        where = f"{'.'.join(place)} " if place else ""
        super().__init__(f"{where}takes {rule}, not {_shown(value)}")

    def below(self, key: object) -> Fault:
        """The fault with `key` before its place, for the object that has the value under `key`."""
        return Fault(self.rule, self.value, (_clipped(str(key) if str(key).isprintable() else ascii(key)), *self.place))


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection while millions of lasting values are made: it would take most of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def parse(text: bytes) -> Any:
    """The value of a JSON text. Raises ValueError for other text, and for values nested too deeply."""
    try:
        with without_collections():
            return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def finite(value: Any) -> Any:
    """`value` as JSON has it: null in place of a number that is not finite, lists in place of tuples."""
    if isinstance(value, Mapping):
        return {name: finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(kind: type[T], value: Any) -> T:
    """Convert what `json` has read from a text to a `kind`. Raises ValueError with the place and the broken rule."""
    parsed: T = _reader(cast(Any, kind))(value)
    return parsed


@cache
def _reader(kind: Any) -> _Read:
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if origin is Annotated:
        return _ruled(_reader(args[0]), args[1])
    if origin is NotRequired:
        return _reader(args[0])
    if origin is Literal:
        return _ruled(_reader(str | int), args)
    if origin in (Union, UnionType):
        return _either([_reader(each) for each in args if each is not NoneType], optional=NoneType in args)
    if origin in (list, tuple):
        return _sequence(origin, args)
    if origin in (dict, Mapping):
        return _mapping(*map(_reader, args))
    if hasattr(kind, "parse"):
        return lambda value: kind.parse(_text(value))
    return _object(kind)


def _ruled(base: _Read, rule: Any) -> _Read:
    holds: Callable[[Any], object]
    if isinstance(rule, re.Pattern):
        holds, words = rule.fullmatch, "a line of text" if rule is _LINE else f"text as {rule.pattern}"
    elif isinstance(rule, range):
        holds, words = rule.__contains__, f"a whole number from {rule.start} to {rule.stop - 1}"
    elif isinstance(rule, frozenset | tuple):
        holds, words = frozenset(rule).__contains__, f"one of {', '.join(sorted(map(str, rule)))}"
    else:
        holds, words = (lambda value: rule(value) is None), ""

    def checked(value: Any) -> Any:
        parsed = base(value)
        if not holds(parsed):
            raise Fault(words, value)
        return parsed

    return checked


def _either(kinds: list[_Read], *, optional: bool) -> _Read:
    def read(value: Any) -> Any:
        if value is None and optional:
            return None
        for kind in kinds[:-1]:
            try:
                return kind(value)
            except ValueError:
                continue
        return kinds[-1](value)

    return read


def _sequence(kind: type, args: tuple[Any, ...]) -> _Read:
    readers = [_reader(each) for each in args if each is not Ellipsis]
    fixed = kind is tuple and Ellipsis not in args

    def read(value: Any) -> Any:
        if type(value) not in (list, tuple) or (fixed and len(value) != len(readers)):
            raise Fault(f"a list of {len(readers)}" if fixed else "a list", value)
        try:
            if fixed:
                return tuple(reader(each) for reader, each in zip(readers, value, strict=True))
            return kind(map(readers[0], value))
        except Fault as fault:
            raise fault.below("[]") from None

    return read


def _mapping(key: _Read, inner: _Read) -> _Read:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Fault("an object", value)
        entries, name = {}, ""
        try:
            for name, each in value.items():
                entries[key(name)] = inner(each)
        except Fault as fault:
            raise fault.below(name) from None
        return entries

    return read


def _object(kind: Any) -> _Read:
    """The reader of a class with annotated fields. A field with a default, or an optional one of a TypedDict, may be
    missing; null counts as missing if the field's type has no None."""
    keeps, known = is_typeddict(kind), get_type_hints(kind, include_extras=True)
    if keeps:
        optional = kind.__optional_keys__ | {name for name, each in known.items() if get_origin(each) is NotRequired}
    else:
        parameters = inspect.signature(kind).parameters
        optional = {name for name, each in parameters.items() if each.default is not each.empty}
        known = {name: known[name] for name in parameters}
    fields = [
        (name, _reader(each), name in optional, each is Any or NoneType in get_args(each))
        for name, each in known.items()
    ]

    def read(value: Any) -> Any:
        if type(value) is list and hasattr(kind, "_fields") and len(value) <= len(fields):
            value = dict(zip(known, value, strict=False))
        if not isinstance(value, Mapping):
            raise Fault("an object", value)
        entries, name = {}, ""
        try:
            for name, inner, may_lack, null in fields:
                if not may_lack or (name in value if null else value.get(name) is not None):
                    entries[name] = inner(value.get(name))
        except Fault as fault:
            raise fault.below(name) from None
        return {name: each for name, each in value.items() if name not in known} | entries if keeps else kind(**entries)

    return read


def _whole(value: Any) -> Any:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise Fault("a whole number", value)
    return value


def _number(value: Any) -> Any:
    if type(value) not in (int, float) or not abs(value) < math.inf or (type(value) is int and abs(value) >= 2**1023):
        raise Fault("a finite number", value)
    return value


def _bool(value: Any) -> Any:
    if type(value) is not bool:
        raise Fault("true or false", value)
    return value


def _text(value: Any) -> Any:
    if type(value) is not str or "\0" in value or not (value.isascii() or _HALVES.search(value) is None):
        raise Fault("text", value)
    return value


_HALVES = re.compile(r"[\ud800-\udfff]")
"""Halves of surrogate pairs, which no file and no terminal takes."""

_PLAIN: dict[Any, _Read] = {int: _whole, float: _number, bool: _bool, str: _text, Any: lambda value: value}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple | Mapping):
        return "an object" if isinstance(value, Mapping) else f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= 2**64:
        return "a larger number"
    return "null" if value is None else _clipped(ascii(value))


def _clipped(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
