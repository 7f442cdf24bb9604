"""What a declared type lets through, and what is said of the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

import pytest

from ppctl.records.json_reader import Count, Line, parse, read


class Place(NamedTuple):
    file: Line
    at: Count = 0


@dataclass
class Record:
    name: str
    places: tuple[Place, ...]
    span: tuple[int, int] = (0, 0)
    share: float | None = 0.5


class Entry(TypedDict):
    kind: Literal["a", 1]
    record: Record
    note: NotRequired[str]


GOOD: dict[str, Any] = {"kind": "a", "record": {"name": "x", "places": [{"file": "f", "at": 3}]}, "later": [1]}


def test_a_value_is_read_as_its_type_and_what_is_not_declared_is_kept_in_an_object() -> None:
    found = read(Entry, GOOD)
    assert found == {"kind": "a", "record": Record("x", (Place("f", 3),)), "later": [1]}
    assert read(Record, {"name": "x", "places": [], "share": None, "span": None, "more": 1}).share is None


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        (Entry, '{"kind": true}', "kind takes"),
        (Entry, '{"kind": "b"}', "kind takes one of 1, a, not 'b'"),
        (Record, '{"name": "x", "places": [{"file": "f", "at": -1}]}', "places.[].at takes a whole number from 0"),
        (Record, '{"name": "a\\u0000", "places": []}', "name takes text, not 'a"),
        (Record, '{"name": "\\ud800", "places": []}', "name takes text, not"),
        (Record, '{"name": "x", "places": [], "share": 1e999}', "share takes a finite number, not inf"),
        (Record, '{"name": "x", "places": [], "share": NaN}', "share takes a finite number, not nan"),
        (Record, '{"name": "x", "places": [], "span": [1]}', "span takes a list of 2, not a list of 1"),
        (dict[Line, int], '{"a\\nb": 1}', "'a\\nb' takes a line of text"),
        (dict[str, int], '{"a": 1e18}', "a takes a whole number, not 1e+18"),
        (dict[str, int], '{"a": %s}' % 10**400, "a takes a whole number, not a larger number"),
        (dict[str, float], '{"a": %s}' % 10**400, "a takes a finite number, not a larger number"),
        (dict[str, int], "[]", "takes an object, not a list of 0"),
    ],
)
def test_the_place_and_the_rule_are_named(kind: Any, text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        read(kind, parse(text.encode()))


@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"a":' * 10**5, b"", b"\xff", b"{"])
def test_what_is_no_json_is_a_value_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        parse(text)
