"""Bytes as people read them. Must not know what is counted. Data (`--json`, plan.json) keeps bytes."""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """A unit of memory."""

    name: str
    size: int

    def of(self, size: int) -> str:
        """How many of this unit `size` bytes are."""
        return f"{size / self.size:.2f}"


GIB = Unit("GiB", 2**30)
_SMALLER = (Unit("MiB", 2**20), Unit("KiB", 2**10))


def unit_for(largest: int) -> Unit:
    """The unit of a sum or a column: the largest one of which its largest number is at least one."""
    return next((unit for unit in (GIB, *_SMALLER) if largest >= unit.size), _SMALLER[-1])


def amount(size: int) -> str:
    """One number with its unit."""
    unit = unit_for(size)
    return f"{unit.of(size)} {unit.name}"
