"""Gradients that runs keep of a step (`log.gradients`, decision 58), and where the gradients of two runs first differ.

The files: gradients/step-N/rank-NNNNN.safetensors, parts of gradients by the names of parameters, and beside them
messages.json with fingerprints of the stages' messages. Every rank writes its parts, also parts of which other ranks
have copies: a comparison shows which copy is wrong.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from ppctl.checkpoint.arrays import numpy_dtype, unequal
from ppctl.checkpoint.boxes import Box, Shape
from ppctl.checkpoint.tensor_parts import DTYPES, in_order
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.families.safetensors import read_header
from ppctl.host.files import read_json, write_atomically
from ppctl.records.json_reader import Count
from ppctl.topology import ParallelSizes

MESSAGES = "messages.json"
_MOST_OF_MESSAGES = 2**26
_NUMPY = {name: torch_name for torch_name, (name, _) in DTYPES.items()}


class Handed(NamedTuple):
    """A fingerprint of the output of a stage's forward, or of the gradient of its input."""

    rank: int
    forward: bool
    stage: int
    microbatch: int
    """The microbatch's number in the global batch, which does not depend on dp."""
    bits: tuple[int, int]
    """The two halves of the sum, modulo 2^64, of the message's values, whose bits are read as integers."""
    squares: float
    """The sum of the squares of the message's values, in float64."""

    @property
    def action(self) -> str:
        """The action that made the message, such as `3F12`."""
        return f"{self.stage}{'F' if self.forward else 'B'}{self.microbatch}"


class _Messages(TypedDict):
    """messages.json: the fields of each Handed, in their order. Squares may be infinite or nan."""

    version: Literal[1]
    messages: list[tuple[Count, bool, Count, Count, tuple[int, int], Any]]


def write_messages(directory: Path, handed: Sequence[Handed]) -> None:
    """Write messages.json of a step."""
    write_atomically(directory / MESSAGES, json.dumps({"version": 1, "messages": handed}) + "\n", durable=False)


def step_directory(gradients: Path, step: int) -> Path:
    """Return where a step is kept, below a run's directory of gradients."""
    return gradients / f"step-{step}"


def forget_step(gradients: Path, step: int) -> None:
    """Delete a kept step; messages.json first, because a step without it counts as incomplete. Raises OSError."""
    path = step_directory(gradients, step)
    for file in [path / MESSAGES, *path.glob("rank-*.safetensors")]:
        file.unlink(missing_ok=True)


def kept_steps(gradients: Path) -> list[int]:
    """Return the steps that are kept whole: those with messages.json, which is written last."""
    numbers = (path.parent.name.removeprefix("step-") for path in gradients.glob(f"step-*/{MESSAGES}"))
    return sorted(int(number) for number in numbers if number.isdecimal())


class KeptPart(NamedTuple):
    """A part of a gradient, from one rank."""

    rank: int
    box: Box
    file: Path
    begin: int
    dtype: str

    def values(self) -> NDArray[Any]:
        """Return the part's values, in the box's shape."""
        flat = np.fromfile(self.file, numpy_dtype(self.dtype), self.box.size, offset=self.begin)
        return flat.reshape(self.box.shape)


class KeptStep:
    """A step that a run has kept. Raises CheckpointError (PP-E645) if a file is damaged."""

    def __init__(self, gradients: Path, step: int) -> None:
        self.path = step_directory(gradients, step)
        self.parts: dict[str, list[KeptPart]] = {}
        """The parts by the parameter's name, in the order of ranks."""
        self.shapes: dict[str, Shape] = {}
        try:
            record = read_json(self.path / MESSAGES, _Messages, _MOST_OF_MESSAGES)
            self.messages = [Handed(*each)._replace(squares=float(each[-1])) for each in record["messages"]]
            for file in sorted(self.path.glob("rank-*.safetensors")):
                for name, part in _parts_of(file):
                    self.parts.setdefault(name, []).append(part)
            self.shapes = {name: _whole_shape(name, parts) for name, parts in self.parts.items()}
        except (OSError, ValueError, TypeError, LookupError, OverflowError, CheckpointError) as error:
            remedy = f"mv {pasted(self.path, f'{self.path}.damaged')}"
            message = f"the gradients kept of step {step} cannot be read: {type(error).__name__}: {error}"
            raise CheckpointError(Problem("PP-E645", message, remedy, str(self.path))) from None

    def whole(self, name: str) -> NDArray[Any]:
        """Return a whole gradient. Of a part's copies it takes the first rank's."""
        parts = self.parts[name]
        shape = self.shapes[name]
        whole = np.zeros(shape, parts[0].values().dtype)
        for part in reversed(parts):
            whole[part.box.within((0,) * len(shape))] = part.values()
        return whole


def _whole_shape(name: str, parts: Sequence[KeptPart]) -> Shape:
    """Return the extents of a gradient with these parts. Raises ValueError if they cannot be all of it."""
    shape = tuple(map(max, zip(*(part.box.end for part in parts), strict=True)))
    if sum(part.box.size for part in parts) < prod(shape):
        raise ValueError(f"{name} is not whole")
    return shape


def _parts_of(file: Path) -> Iterator[tuple[str, KeptPart]]:
    """Yield (parameter, kept part) for each gradient in a rank's file. Raises ValueError for a damaged header."""
    rank = int(file.stem.removeprefix("rank-"))
    for key, stored in read_header(file).items():
        name, _, offset = key.removeprefix("gradient.").partition("@")
        place = tuple(map(int, offset.split(","))) if offset else (0,) * len(stored.shape)
        if min((0, *place)) < 0:
            raise ValueError(f"{key} begins before its tensor")
        yield name, KeptPart(rank, Box(place, stored.shape), file, stored.offset, _NUMPY[stored.dtype])


# Two runs


_OF_SQUARES = 10.0
"""The factor by which sums of squares may differ more than values: 2 for the square, and a margin for the sum."""


class Side(NamedTuple):
    """One run's step, and what is needed to read it."""

    step: KeptStep
    sizes: ParallelSizes
    sequence_parallel: bool
    last_stage: int

    def copies(self, forward: bool, stage: int) -> int:
        """Return how many ranks have copies of a message; the other ranks have other parts of it."""
        whole = not self.sequence_parallel or (forward and stage == self.last_stage)
        return self.sizes.tp if whole else 1

    def handed(self) -> dict[tuple[bool, int, int], list[Handed]]:
        """Return the ranks' fingerprints by (forward, stage, microbatch). Losses are left out if ranks have parts of
        sequences: the squares of the parts' losses do not add up to the square of their sum."""
        by_place: dict[tuple[bool, int, int], list[Handed]] = {}
        for each in self.step.messages:
            if self.sizes.cp == 1 or not each.forward or each.stage != self.last_stage:
                by_place.setdefault((each.forward, each.stage, each.microbatch), []).append(each)
        return by_place


class ActionDifference(NamedTuple):
    """The first message between stages, or loss, that differs."""

    action: str
    stage: int
    ranks: list[int]
    """Ranks of the second run."""
    relative: float
    """The relative difference of the norms; 0 if only bits differ."""


class ParameterDifference(NamedTuple):
    """A parameter whose gradient differs between two runs."""

    name: str
    stage: int
    ranks: list[int]
    """Ranks of the second run whose part or copy differs."""
    of: int
    """How many ranks have parts or copies of the gradient."""
    relative: float
    """The largest difference over the largest absolute value in the first run; nan if only that value is 0."""
    at: tuple[int, ...]
    """Where the largest difference is."""
    values: tuple[float, float]
    """The values at that place in both runs."""


@dataclass(frozen=True, slots=True)
class StepDifferences:
    """The differences of a step between two runs."""

    action: ActionDifference | None
    parameters: list[ParameterDifference]
    """In the order in which a backward makes the gradients: the last parameter of the last stage first."""
    equal: int
    """The number of gradients that are equal."""
    missing: list[str]
    """Names that only one of the two steps has, or that have different shapes."""
    unlike: list[tuple[str, str, str]]
    """(`A` or `B`, name, owner) of shared parameters whose kept gradient is not the owner's, a fault of the run."""
    largest: float
    """The largest relative difference of all gradients, also below the tolerance."""

    @property
    def same(self) -> bool:
        """Whether nothing differs by more than the tolerance."""
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
    """Compare two runs' steps; returns the differences. A `tolerance` of 0 asks for equal bits; otherwise max |a - b| /
    max |a| of a gradient may be as large as `tolerance`. `place_of` gives a parameter's stage and its number in the
    order of forwards. `messages` (only if both runs have the same stages) compares messages too. `uses` are the names
    of one shared parameter, the owner's first."""
    ours, theirs = first.step.shapes.items(), second.step.shapes.items()
    different, equal, largest = [], 0, 0.0
    for name in sorted(dict(ours & theirs), key=in_order):
        progress(name)
        compared = _parameter(name, first.step, second.step, tolerance, place_of(name)[0])
        largest = max(largest, 0.0 if math.isnan(compared.relative) else compared.relative)
        if compared.ranks:
            different.append(compared)
        else:
            equal += 1
    action = _first_action(first, second, tolerance) if messages else None
    different.sort(key=lambda each: place_of(each.name), reverse=True)
    missing = sorted(dict(ours ^ theirs), key=in_order)
    unlike = [use for name, side in (("A", first), ("B", second)) for use in _unequal_uses(name, side.step, uses)]
    return StepDifferences(action, different, equal, missing, unlike, largest)


def _unequal_uses(run: str, step: KeptStep, uses: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (run, use, owner) for each use of a shared parameter whose kept gradient differs from the owner's."""
    owner, *others = [name for name in uses if name in step.parts] or [""]
    for name in others:
        if np.any(_apart(step.whole(owner), step.whole(name))):
            yield run, name, owner


def _parameter(name: str, first: KeptStep, second: KeptStep, tolerance: float, stage: int) -> ParameterDifference:
    """Compare a parameter's gradient, whole in `first`, with its parts in `second`; returns the difference. `tolerance`
    is relative to the largest absolute value in `first`."""
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
    """Return |a - b| by element: 0 where the bits are equal, infinite where they differ and either is nan."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)
    return np.asarray(np.where(unequal(ours, theirs), np.where(np.isnan(apart), np.inf, apart), 0.0))


def _first_action(first: Side, second: Side, tolerance: float) -> ActionDifference | None:
    """Return the first differing message of a microbatch: forwards from stage 0, then backwards from the last stage."""
    ours, theirs = first.handed(), second.handed()
    different = []
    for key in ours.keys() & theirs.keys():
        relative = _handed_apart(key, (first, ours[key]), (second, theirs[key]), tolerance)
        if relative is not None:
            different.append((key, relative))
    if not different:
        return None
    (forward, stage, mb), relative = min(different, key=lambda each: _order(each[0]))
    ranks = sorted(each.rank for each in theirs[forward, stage, mb])
    return ActionDifference(theirs[forward, stage, mb][0].action, stage, ranks, relative)


def _order(key: tuple[bool, int, int]) -> tuple[bool, int, int]:
    forward, stage, mb = key
    return not forward, stage if forward else -stage, mb


def _handed_apart(
    key: tuple[bool, int, int], one: tuple[Side, list[Handed]], other: tuple[Side, list[Handed]], tolerance: float
) -> float | None:
    """Return the relative difference of the norms if two messages differ; None if they do not."""
    (a, ours), (b, theirs) = one, other
    if not tolerance and [each.bits for each in ours] == [each.bits for each in theirs]:
        return None
    squares = [sum(each.squares for each in seen) / side.copies(*key[:2]) for side, seen in ((a, ours), (b, theirs))]
    apart = abs(squares[0] - squares[1])
    if tolerance and apart <= _OF_SQUARES * tolerance * squares[0]:
        return None
    return apart / squares[0] / 2 if squares[0] else math.inf if apart else 0.0
