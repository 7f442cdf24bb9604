"""Boxes: parts of a tensor with a range on each dim. Ranks hold boxes, files store them, loads ask for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]
_MOST_DIVIDED = 6
"""The most dims on which the parts of a tensor may differ: each doubles the corners of a part."""


class Box(NamedTuple):
    """The elements offset[d] to offset[d] + shape[d] of each dim d."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """Return the box of a whole tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """The number of elements; 1 for a tensor without dims."""
        return prod(self.shape)

    @property
    def end(self) -> Shape:
        """The index after the last element on each dim."""
        return tuple(begin + extent for begin, extent in zip(self.offset, self.shape, strict=True))

    def within(self, origin: Shape) -> tuple[slice, ...]:
        """The slices that take this box out of a tensor whose first element is at `origin`."""
        pairs = zip(self.offset, self.end, origin, strict=True)
        return tuple(slice(begin - zero, end - zero) for begin, end, zero in pairs)

    def moved(self, by: Shape) -> Box:
        """Return the box of the same elements in a larger tensor, in which this box's tensor begins at `by`."""
        return Box(tuple(begin + step for begin, step in zip(self.offset, by, strict=True)), self.shape)


def common(one: Box, other: Box) -> Box | None:
    """Return the box of the elements that two boxes of one tensor share; None if there are none."""
    offset = tuple(map(max, one.offset, other.offset))
    shape = tuple(end - begin for begin, end in zip(offset, map(min, one.end, other.end), strict=True))
    return Box(offset, shape) if all(extent > 0 for extent in shape) else None


def boxes_of_run(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """Yield the elements `start` to `stop` of a tensor read flat (row-major), as contiguous boxes in order. A matrix
    gives at most three: the end of a row, whole rows, the beginning of a row."""
    if start >= stop:
        return
    if not shape or (start, stop) == (0, prod(shape)):
        yield Box.whole(shape)
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows, if any
    if first > last:  # within one row
        yield from _in_row(shape, start // row, start % row, start % row + stop - start)
        return
    if start % row:
        yield from _in_row(shape, first - 1, start % row, row)
    if first < last:
        yield Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
    if stop % row:
        yield from _in_row(shape, last, 0, stop % row)


def _in_row(shape: Shape, row: int, start: int, stop: int) -> Iterator[Box]:
    for box in boxes_of_run(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))


def tiling_fault(shape: Shape, boxes: Iterable[Box]) -> str:
    """Return why the boxes do not cover each element of a tensor of this shape exactly once; empty if they do."""
    in_order = tuple(sorted(boxes))
    if any({len(box.offset), len(box.shape)} != {len(shape)} for box in in_order):
        return f"its parts have another number of dims than {list(shape)}"
    return _tiling_fault(shape, in_order)


@lru_cache(maxsize=1024)
def _tiling_fault(shape: Shape, boxes: tuple[Box, ...]) -> str:
    """Return the fault of sorted boxes; cached, because a model's layers and their moments share a few divisions.

    Corners get signs, opposite for neighbours. Only if boxes neither overlap nor leave anything out do their signed
    corners add up to those of the whole tensor. Comparing boxes in pairs would take too long.
    """
    for box in boxes:
        if any(end > extent for end, extent in zip(box.end, shape, strict=True)) or min((0, *box.offset)) < 0:
            return f"{_text(box)} is outside of {list(shape)}"
    dims = [d for d, extent in enumerate(shape) if any((b.offset[d], b.shape[d]) != (0, extent) for b in boxes)]
    if len(dims) > _MOST_DIVIDED:
        return f"it is divided on {len(dims)} dims, which are too many"
    corners: dict[Shape, int] = defaultdict(int)
    for sides in product((0, 1), repeat=len(dims)):
        sign = (-1) ** sum(sides)
        ends = list(zip(dims, sides, strict=True))
        corners[tuple(shape[d] * side for d, side in ends)] -= sign
        for box in boxes:
            corners[tuple(box.offset[d] + box.shape[d] * side for d, side in ends)] += sign
    if not any(corners.values()) or not prod(shape):
        return ""
    if overlap := next((pair for pair in pairwise(boxes) if common(*pair)), None):
        return f"{_text(overlap[0])} and {_text(overlap[1])} overlap"
    lacking = prod(shape) - sum(box.size for box in boxes)
    return f"{lacking} of {prod(shape)} elements are in no part" if lacking > 0 else "its parts overlap"


def _text(box: Box) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(box.offset, box.end, strict=True))}]"
