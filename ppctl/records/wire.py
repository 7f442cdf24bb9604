"""Converts values to bytes for another process, and back, checked against a type annotation: JSON, then raw bytes.

Arriving data choose no class and run nothing: the receiver's annotation says what is made, and all else is refused.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from io import BytesIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_HEAD = struct.Struct("<Q")
"""The number of bytes of the JSON."""

Convert = Callable[[Any, BytesIO], Any]
"""(value, raw) -> its JSON, or (JSON, raw) -> the value. The value's bytes are appended to `raw`, or read there."""

AS_TEXT: dict[Any, tuple[Callable[[Any], str], Callable[[str], Any]]] = {Path: (str, Path)}
"""Types that are sent as text -> (to text, from text). Modules that know further types add them."""


class Malformed(ValueError):
    """A value or bytes that are not of the annotated type."""


def packed(kind: Any, value: Any) -> bytes:
    """The bytes of a value of the annotation `kind`. Raises Malformed for any other value."""
    raw = BytesIO()
    with _refusing():
        text = json.dumps(_converts(kind)[0](value, raw), separators=(",", ":")).encode()
    return b"".join((_HEAD.pack(len(text)), text, raw.getbuffer()))


def unpacked(kind: Any, data: bytes) -> Any:
    """The value that `packed` turned into `data`; floats have the same bits. Raises Malformed for other data."""
    with _refusing():
        end = _HEAD.size + _HEAD.unpack_from(data)[0]
        raw = BytesIO(data)
        raw.seek(end)
        value = _converts(kind)[1](json.loads(data[_HEAD.size : end]), raw)
        if end > len(data) or raw.read(1):
            raise Malformed("fewer or more bytes than its value has")
    return value


@contextmanager
def _refusing() -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError, struct.error) as error:
        raise error if isinstance(error, Malformed) else Malformed(f"{type(error).__name__}: {error}") from None


@cache
def _converts(kind: Any) -> tuple[Convert, Convert]:
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _WAYS:
        return _WAYS[kind]
    if kind in AS_TEXT:
        return _spelt(kind, *AS_TEXT[kind])
    if origin in (Union, UnionType):
        return _either(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _row(tuple, arguments)
    if origin in (tuple, list, set, frozenset, Sequence):
        return _many(list if origin is Sequence else origin, arguments[0])
    if origin in (dict, Mapping):
        return _mapping(arguments)
    if issubclass(kind, Enum):
        return lambda value, _: _only(kind)(value, _).value, lambda plain, _: kind(plain)
    return _record(kind)


def _as_it_is(value: Any, _: BytesIO) -> Any:
    return value


def _only(kind: Any) -> Convert:
    def check(value: Any, _: BytesIO) -> Any:
        if type(value) is not kind:
            raise Malformed(f"{type(value).__name__} in place of {kind.__name__}")
        return value

    return check


def _float(value: Any, _: BytesIO) -> float:
    if not isinstance(value, int | float):
        raise Malformed(f"{type(value).__name__} in place of float")
    return float(value)


def _write(value: Any, raw: BytesIO) -> int:
    if not isinstance(value, bytes | bytearray):
        raise Malformed(f"{type(value).__name__} in place of bytes")
    return raw.write(value)


def _read(plain: Any, raw: BytesIO) -> bytes:
    data = raw.read(_only(int)(plain, raw))
    if len(data) != plain:
        raise Malformed(f"{len(data)} bytes in place of {plain}")
    return data


_WAYS: dict[Any, tuple[Convert, Convert]] = {
    **{kind: (_only(kind or NoneType),) * 2 for kind in (None, NoneType, bool, int, str)},
    float: (_float, _only(float)),
    bytes: (_write, _read),
    Any: (_as_it_is, _as_it_is),
}


def _spelt(kind: Any, to: Callable[[Any], str], back: Callable[[str], Any]) -> tuple[Convert, Convert]:
    def of_kind(value: Any) -> Any:
        if not isinstance(value, kind):
            raise Malformed(f"{type(value).__name__} in place of {kind.__name__}")
        return value

    return lambda value, _: to(of_kind(value)), lambda plain, raw: of_kind(back(_only(str)(plain, raw)))


def _either(kinds: Sequence[Any]) -> tuple[Convert, Convert]:
    """Converters of a union: None stays, else the first of the other kinds that takes the value."""
    ways = [_converts(kind) for kind in kinds if kind is not NoneType]

    def first_of(converts: Sequence[Convert]) -> Convert:
        def convert(value: Any, raw: BytesIO) -> Any:
            if value is None and NoneType in kinds:
                return None
            for each in converts[:-1]:
                try:
                    return each(value, raw)
                except Malformed:
                    pass
            return converts[-1](value, raw)

        return convert

    return first_of([to for to, _ in ways]), first_of([back for _, back in ways])


def _row(make: Callable[[list[Any]], Any], kinds: Sequence[Any]) -> tuple[Convert, Convert]:
    """Converters of a tuple with one value of each of these kinds."""
    ways = [_converts(kind) for kind in kinds]
    to, back = [way[0] for way in ways], [way[1] for way in ways]

    def read(plain: Any, raw: BytesIO) -> Any:
        return make([convert(each, raw) for convert, each in zip(back, _listed(plain, len(back)), strict=True)])

    return lambda value, raw: [convert(each, raw) for convert, each in zip(to, value, strict=True)], read


def _listed(plain: Any, length: int | None = None) -> list[Any]:
    if type(plain) is not list or length not in (None, len(plain)):
        raise Malformed(f"{plain!r:.80} in place of a list" + f" of {length}" * (length is not None))
    return plain


def _many(make: Callable[[list[Any]], Any], kind: Any) -> tuple[Convert, Convert]:
    """Converters of a list or tuple; a plain kind is checked only by the set of its values' types, which is fast."""
    to, back = _converts(kind)
    if to is back and kind is not Any:  # without conversion: for 10^5 values only the types are checked
        plain_kind = kind or NoneType

        def check(value: Any, raw: BytesIO) -> Any:
            if not set(map(type, value)) <= {plain_kind}:
                raise Malformed(f"other values in a list of {plain_kind.__name__}")
            return list(value)

        return check, lambda plain, raw: make(check(_listed(plain), raw))
    return (
        lambda value, raw: [to(each, raw) for each in value],
        lambda plain, raw: make([back(each, raw) for each in _listed(plain)]),
    )


def _mapping(kinds: Sequence[Any]) -> tuple[Convert, Convert]:
    to, back = _row(tuple, kinds)
    return (
        lambda value, raw: [to(pair, raw) for pair in value.items()],
        lambda plain, raw: dict(back(pair, raw) for pair in _listed(plain)),
    )


def _record(kind: Any) -> tuple[Convert, Convert]:
    names = [each.name for each in fields(kind)] if is_dataclass(kind) else list(kind._fields)
    hints = get_type_hints(kind)
    to, back = _row(lambda values: kind(*values), [hints[name] for name in names])
    return lambda value, raw: to([getattr(_only(kind)(value, raw), name) for name in names], raw), back
