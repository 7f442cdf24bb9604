"""Boxes: parts of a tensor with a range on each dim, which ranks hold, files store and loads ask for.

Knows shapes and offsets. Must not know values, names or files. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from math import prod
from typing import NamedTuple

Shape = tuple[int, ...]


class Box(NamedTuple):
    """The elements offset[d] to offset[d] + shape[d] of each dim d."""

    offset: Shape
    shape: Shape

    @classmethod
    def whole(cls, shape: Shape) -> Box:
        """All of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def size(self) -> int:
        """Elements; of a number, one."""
        return prod(self.shape)

    @property
    def end(self) -> Shape:
        """Behind the last element of each dim."""
        return tuple(begin + extent for begin, extent in zip(self.offset, self.shape, strict=True))

    def within(self, origin: Shape) -> tuple[slice, ...]:
        """The slices that take this box out of a tensor whose first element is at `origin`."""
        pairs = zip(self.offset, self.end, origin, strict=True)
        return tuple(slice(begin - zero, end - zero) for begin, end, zero in pairs)

    def moved(self, by: Shape) -> Box:
        """The box as seen in a tensor in which this one's begins at `by`."""
        return Box(tuple(begin + step for begin, step in zip(self.offset, by, strict=True)), self.shape)


def common(one: Box, other: Box) -> Box | None:
    """Return the elements that two boxes of one tensor share; None if none. Two boxes of one number share it."""
    offset = tuple(map(max, one.offset, other.offset))
    shape = tuple(end - begin for begin, end in zip(offset, map(min, one.end, other.end), strict=True))
    return Box(offset, shape) if all(extent > 0 for extent in shape) else None


def boxes_of_run(shape: Shape, start: int, stop: int) -> Iterator[Box]:
    """The elements `start` to `stop` of a tensor read flat (row-major), as boxes in that order.

    Each is contiguous. Of a matrix there are at most three: the end of a row, whole rows, the beginning of one.
    """
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
    """Why the boxes do not make up a tensor of this shape, each element once; empty if they do."""
    in_order = tuple(sorted(boxes))
    if any({len(box.offset), len(box.shape)} != {len(shape)} for box in in_order):
        return f"its parts have other dims than {list(shape)}"
    return _tiling_fault(shape, in_order)


@lru_cache(maxsize=1024)
def _tiling_fault(shape: Shape, boxes: tuple[Box, ...]) -> str:
    """Return the fault of sorted boxes; kept, as all layers of a model and their moments are divided in a few ways."""
    count, open_boxes = 0, list[Box]()
    for box in boxes:
        if any(end > extent for end, extent in zip(box.end, shape, strict=True)) or min((0, *box.offset)) < 0:
            return f"{_text(box)} is outside of {list(shape)}"
        if shape:  # those that end before this one begins on dim 0 cannot overlap it, nor any that follows
            open_boxes = [other for other in open_boxes if other.end[0] > box.offset[0]]
        overlap = next((other for other in open_boxes if common(other, box)), None)
        if overlap is not None:
            return f"{_text(overlap)} and {_text(box)} overlap"
        open_boxes.append(box)
        count += box.size
    return "" if count == prod(shape) else f"{prod(shape) - count} of {prod(shape)} elements are in no part"


def _text(box: Box) -> str:
    return f"[{', '.join(f'{begin}:{end}' for begin, end in zip(box.offset, box.end, strict=True))}]"
