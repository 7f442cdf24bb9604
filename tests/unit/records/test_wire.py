"""Values between processes: they arrive as they were, and nothing else does."""

from __future__ import annotations

import json
import math
import pickle
import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.disk import WrittenParts
from ppctl.checkpoint.tensor_parts import TensorPart, packed_parts, parts_of
from ppctl.errors import Problem
from ppctl.records.wire import Malformed, packed, unpacked
from ppctl.schedule.action import Op, Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule


class Inner(NamedTuple):
    path: Path | None
    found: list[tuple[int, bool]]


class Outer(NamedTuple):
    inner: Inner
    data: bytes
    others: Mapping[int, tuple[float, ...]]
    more: bytes = b""


OUTER = Outer(Inner(Path("/a b/\udcff"), [(1, True), (-(10**30), False)]), b"\0\xff", {3: (0.1, -0.0), -1: ()}, b"end")
PART = TensorPart("model.w", (4, 5), "float32", Box((0, 0), (4, 5)))
SCHEDULE = lower(make_schedule("1f1b", pp=2, num_microbatches=4))

VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (bool, True),
    (int, -(2**70)),
    (str, "\0\ud800 \u2028 ü \x1b"),
    (bytes, bytes(range(256))),
    (float, 5e-324),
    (tuple[float, ...], (math.inf, -math.inf, 0.1 + 0.2, -0.0, 1e308)),
    (list[str], ["a", ""]),
    (tuple[bytes, dict[str, Any]], (b"text", {"a": [1, None, {"b": 0.5}]})),
    (frozenset[int], frozenset({3, 1})),
    (int | str | None, "3"),
    (list[bytes | None], [b"", None, b"x"]),
    (Sequence[Op], [Op.F, Op.REDUCE_GRAD]),
    (tuple[Problem, ...], (Problem("PP-E1", "what", "try", "here"),)),
    (Outer, OUTER),
    (Outer | None, None),
    (TensorPart, PART),
    (WrittenParts, WrittenParts((5, 4, "ab"), [7], ["ab cd", ""])),
    (Schedule, SCHEDULE),
]


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=repr)
def test_a_value_arrives_as_it_was(kind: Any, value: Any) -> None:
    found = unpacked(kind, packed(kind, value))
    assert (found, type(found), repr(found)) == (value, type(value), repr(value))


def test_numbers_arrive_to_the_last_bit() -> None:
    draw = random.Random(1)
    numbers = [struct.unpack("<d", draw.randbytes(8))[0] for _ in range(10_000)]
    found = unpacked(list[float], packed(list[float], numbers))
    assert [each for each in zip(numbers, found, strict=True) if each[0] != each[1] and not math.isnan(each[0])] == []
    assert sum(map(math.isnan, found)) == sum(map(math.isnan, numbers))


def as_bytes(plain: Any, raw: bytes = b"") -> bytes:
    text = plain if isinstance(plain, bytes) else json.dumps(plain).encode()
    return struct.pack("<Q", len(text)) + text + raw


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        (int, as_bytes(True)),
        (int, as_bytes(1.0)),
        (int, as_bytes(b"1e999")),
        (int, as_bytes(b"9" * 5000)),
        (bool, as_bytes(1)),
        (float, as_bytes(1)),
        (str, as_bytes(None)),
        (None, as_bytes(0)),
        (bytes, as_bytes(4, b"abc")),
        (bytes, as_bytes(-1, b"abc")),
        (bytes, as_bytes(2, b"abc")),
        (bytes, as_bytes("abc")),
        (list[str], as_bytes(["a", 1])),
        (list[str], as_bytes("ab")),
        (list[int], as_bytes({"0": 1})),
        (tuple[int, str], as_bytes([1])),
        (tuple[int, str], as_bytes([1, "a", 2])),
        (Op, as_bytes("EXEC")),
        (Op, as_bytes([])),
        (dict[str, int], as_bytes([["a", 1, 2]])),
        (TensorPart, as_bytes(["w", [4], "float32", [[0], [None]]])),
        (TensorPart, as_bytes({"name": "w"})),
        (Path, as_bytes(3)),
        (Any, as_bytes(b"[" * 100_000)),
        (list[int], as_bytes(b"[" * 100_000)),
        (str, as_bytes(b'"\xff"')),
        (int, b""),
        (int, b"\x01"),
        (int, struct.pack("<Q", 2**64 - 1) + b"1"),
        (int, as_bytes(b"")),
        (int, as_bytes(1) + b"more"),
        (int, pickle.dumps(1)),
    ],
)
def test_all_else_is_refused(kind: Any, data: bytes) -> None:
    with pytest.raises(Malformed):
        unpacked(kind, data)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, True),
        (None, 0),
        (list[int], [1, "a"]),
        (tuple[int, int], (1,)),
        (Path, "a"),
        (Outer, Inner(None, [])),
        (Any, {1}),
    ],
)
def test_a_value_of_another_type_is_not_sent(kind: Any, value: Any) -> None:
    with pytest.raises(Malformed):
        packed(kind, value)


def altered(data: bytes, draw: random.Random) -> bytes:
    """A few bytes changed, cut off, doubled or moved."""
    found = bytearray(data)
    for _ in range(draw.randrange(1, 4)):
        at, to = sorted(draw.randrange(len(found) + 1) for _ in range(2))
        how = draw.randrange(4)
        if how == 0 and at < len(found):
            found[at] = draw.randrange(256)
        elif how == 1:
            del found[at:to]
        elif how == 2:
            found[at:at] = found[at : min(to, at + 50)]
        else:
            found[at:at] = draw.choice([b"null", b"-1", b"1e999", b"[", b'"', b"{}", b"true", draw.randbytes(3)])
    return bytes(found)


@pytest.mark.parametrize(("kind", "value"), VALUES, ids=repr)
def test_altered_bytes_are_another_value_of_the_type_or_refused(kind: Any, value: Any) -> None:
    draw, data = random.Random(2), packed(kind, value)
    for _ in range(200):
        try:
            found = unpacked(kind, altered(data, draw))
        except Malformed:
            continue
        packed(kind, found)


def test_parts_arrive_as_they_were_and_altered_ones_are_refused() -> None:
    parts = [TensorPart(f"w{n}", (n % 3, 2), "float32", Box((0, n), (1, 1))) for n in range(300)]
    data, draw = packed_parts(parts), random.Random(3)
    assert parts_of(data) == parts and parts_of(packed_parts([])) == []
    assert all(isinstance(part.box, Box) for part in parts_of(data))
    for _ in range(300):
        try:
            found = parts_of(altered(data, draw))
        except Malformed:
            continue
        assert all(isinstance(part, TensorPart) for part in found)
