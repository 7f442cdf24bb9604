"""Two runs' gradients of one step compared: the first action and the parameters in which they differ.

Knows kept steps, how ranks share what stages hand on, and how far two numbers may lie apart. Must not know runs, their
figures, nor why they should be equal (`plan/parity.py`). numpy alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppctl.checkpoint.gradients import Handed, KeptStep
from ppctl.checkpoint.names import in_order
from ppctl.topology import ParallelSizes

_OF_SQUARES = 10.0
"""How much further than values sums of squares may lie apart: twice for the square, and room for what adds up."""


class Side(NamedTuple):
    """One run's step, and what is needed to read it."""

    step: KeptStep
    sizes: ParallelSizes
    sequence_parallel: bool
    last_stage: int

    def copies(self, forward: bool, stage: int) -> int:
        """How many ranks have the same values of a message; the others have parts of them."""
        whole = not self.sequence_parallel or (forward and stage == self.last_stage)
        return self.sizes.tp if whole else 1

    def handed(self) -> dict[tuple[bool, int, int], list[Handed]]:
        """What stages handed on, by (forward, stage, microbatch), as several ranks had it.

        Without losses of ranks that have a part of every sequence: their squares are not those of the sum.
        """
        found: dict[tuple[bool, int, int], list[Handed]] = {}
        for each in self.step.messages:
            if self.sizes.cp == 1 or not each.forward or each.stage != self.last_stage:
                found.setdefault((each.forward, each.stage, each.microbatch), []).append(each)
        return found


class ActionDifference(NamedTuple):
    """The first thing handed on that differs."""

    action: str
    stage: int
    ranks: list[int]
    """Of the second run."""
    relative: float
    """Of the norm; 0 where only bits differ."""


class ParameterDifference(NamedTuple):
    """A gradient that differs."""

    name: str
    stage: int
    ranks: list[int]
    """Of the second run, those whose part or copy differs."""
    of: int
    """How many ranks have parts or copies."""
    relative: float
    """The largest difference over the largest absolute value of the first run's; nan where that is 0."""
    at: tuple[int, ...]
    """Where the largest difference is."""
    values: tuple[float, float]
    """There, in both."""


@dataclass(frozen=True, slots=True)
class StepDifferences:
    """What of a step is not the same in both runs."""

    action: ActionDifference | None
    parameters: list[ParameterDifference]
    """In the order in which a backward makes them: the last one of the last stage first."""
    equal: int
    """Gradients that are the same."""
    missing: list[str]
    """Names that only one of the two has, or that have another shape in the other one."""
    unlike: list[tuple[str, str, str]]
    """(`A` or `B`, name, owner): uses of a shared parameter whose gradient is not its owner's, which is no step's."""
    largest: float
    """The largest relative difference of all gradients, those within the tolerance included."""

    @property
    def same(self) -> bool:
        """Whether nothing differs beyond what may."""
        return self.action is None and not (self.parameters or self.missing or self.unlike)


def compare_step(
    first: Side,
    second: Side,
    *,
    tolerance: float,
    place_of: Callable[[str], tuple[int, int]],
    messages: bool = True,
    uses: Sequence[str] = (),
    progress: Callable[[str], None] = lambda name: None,
) -> StepDifferences:
    """Compare. `tolerance` 0 asks for equal bits; otherwise max |a - b| / max |a| of a gradient may be as large.

    `place_of` gives a parameter's stage and its number in the order of forwards. `messages`: whether both runs have the
    same stages; `uses`: names of one shared parameter, its owner first. One gradient and a part of it are in memory.
    """
    ours, theirs = first.step.shapes.items(), second.step.shapes.items()
    different, equal, largest = [], 0, 0.0
    for name in sorted(dict(ours & theirs), key=in_order):
        progress(name)
        found = _parameter(name, first.step, second.step, tolerance, place_of(name)[0])
        largest = max(largest, 0.0 if math.isnan(found.relative) else found.relative)
        if found.ranks:
            different.append(found)
        else:
            equal += 1
    action = _first_action(first, second, tolerance) if messages else None
    different.sort(key=lambda each: place_of(each.name), reverse=True)
    missing = sorted(dict(ours ^ theirs), key=in_order)
    unlike = [found for name, side in (("A", first), ("B", second)) for found in _unlike(name, side.step, uses)]
    return StepDifferences(action, different, equal, missing, unlike, largest)


def _unlike(run: str, step: KeptStep, uses: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The uses of a shared parameter that did not get the sum over all of them, as its owner did."""
    owner, *others = [name for name in uses if name in step.parts] or [""]
    for name in others:
        if np.any(_apart(step.whole(owner), step.whole(name))):
            yield run, name, owner


def _parameter(name: str, first: KeptStep, second: KeptStep, tolerance: float, stage: int) -> ParameterDifference:
    whole = first.whole(name)
    scale = float(np.max(np.abs(whole.astype(np.float64)), initial=0.0))
    parts = second.parts[name]
    wrong, worst, at, values = list[int](), -1.0, tuple[int, ...](), (math.nan, math.nan)
    for part in parts:
        ours, theirs = whole[part.box.within((0,) * whole.ndim)], part.values()
        apart = _apart(ours, theirs)
        most = float(np.max(apart, initial=0.0))
        if most > worst:
            place = np.unravel_index(int(np.argmax(apart)), part.box.shape) if part.box.shape else ()
            at = tuple(int(i) + begin for i, begin in zip(place, part.box.offset, strict=True))
            worst, values = most, (float(ours[place]), float(theirs[place]))
        if most > tolerance * scale and part.rank not in wrong:
            wrong.append(part.rank)
    relative = worst / scale if scale else (0.0 if worst <= 0.0 else math.nan)
    return ParameterDifference(name, stage, wrong, len({part.rank for part in parts}), relative, at, values)


def _apart(ours: NDArray[Any], theirs: NDArray[Any]) -> NDArray[np.float64]:
    """|a - b|; 0 where both have the same bits, infinite where they differ and one is not a number."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)
    bits = np.dtype(f"u{ours.dtype.itemsize}")
    same = ours.view(bits) == theirs.view(bits) if ours.dtype == theirs.dtype else a == b
    return np.asarray(np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart)))


def _first_action(first: Side, second: Side, tolerance: float) -> ActionDifference | None:
    """The first one along the way of a microbatch: forwards from stage 0 on, then backwards from the last stage on."""
    ours, theirs = first.handed(), second.handed()
    found = []
    for key in ours.keys() & theirs.keys():
        relative = _handed_apart(key, (first, ours[key]), (second, theirs[key]), tolerance)
        if relative is not None:
            found.append((key, relative))
    if not found:
        return None
    (forward, stage, mb), relative = min(found, key=lambda each: _order(each[0]))
    ranks = sorted(each.rank for each in theirs[forward, stage, mb])
    return ActionDifference(theirs[forward, stage, mb][0].action, stage, ranks, relative)


def _order(key: tuple[bool, int, int]) -> tuple[bool, int, int]:
    forward, stage, mb = key
    return not forward, stage if forward else -stage, mb


def _handed_apart(
    key: tuple[bool, int, int], one: tuple[Side, list[Handed]], other: tuple[Side, list[Handed]], tolerance: float
) -> float | None:
    """The relative difference of the norms where two messages differ; None where they do not."""
    (a, ours), (b, theirs) = one, other
    if not tolerance and [each.bits for each in ours] == [each.bits for each in theirs]:
        return None
    squares = [sum(each.squares for each in of) / side.copies(*key[:2]) for side, of in ((a, ours), (b, theirs))]
    apart = abs(squares[0] - squares[1])
    if tolerance and apart <= _OF_SQUARES * tolerance * squares[0]:
        return None
    return apart / squares[0] / 2 if squares[0] else math.inf if apart else 0.0
