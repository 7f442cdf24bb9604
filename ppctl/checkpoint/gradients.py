"""What a run keeps of a step for a comparison: each rank's gradients, and fingerprints of what stages hand on.

Knows its files: gradients/step-N/rank-NNNNN.safetensors, parts of gradients by the names of parameters, and beside them
messages.json. Must not know torch, models or how a step is computed. Every rank writes what it has, copies included:
which of several copies is wrong is what a comparison is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ppctl.checkpoint.boxes import Box, Shape
from ppctl.checkpoint.manifest import DTYPES
from ppctl.errors import CheckpointError, Problem, pasted
from ppctl.families.safetensors import read_header
from ppctl.files import read_json, write_atomically
from ppctl.json_reader import Count

MESSAGES = "messages.json"
_MOST_OF_MESSAGES = 2**26
_NUMPY = {name: torch_name for torch_name, (name, _) in DTYPES.items()}


class Handed(NamedTuple):
    """What a stage handed on: the output of a forward, or the gradient of its input."""

    rank: int
    forward: bool
    stage: int
    microbatch: int
    """Of the global batch, whatever dp is."""
    bits: tuple[int, int]
    """The halves of the sum of its values' bits, read as integers, modulo 2^64."""
    squares: float
    """The sum of its values' squares, in float64."""

    @property
    def action(self) -> str:
        """Such as `3F12`."""
        return f"{self.stage}{'F' if self.forward else 'B'}{self.microbatch}"


class _Messages(TypedDict):
    """messages.json: the fields of each Handed, in their order. Squares may be infinite, or no number."""

    version: Literal[1]
    messages: list[tuple[Count, bool, Count, Count, tuple[int, int], Any]]


def write_messages(directory: Path, handed: Sequence[Handed]) -> None:
    """Write messages.json of a step."""
    write_atomically(directory / MESSAGES, json.dumps({"version": 1, "messages": handed}) + "\n", durable=False)


def step_directory(gradients: Path, step: int) -> Path:
    """Where a step is kept, below a run's directory of gradients."""
    return gradients / f"step-{step}"


def forget_step(gradients: Path, step: int) -> None:
    """Delete what is kept of a step; its messages first, without which it is not whole. Raises OSError."""
    path = step_directory(gradients, step)
    for file in [path / MESSAGES, *path.glob("rank-*.safetensors")]:
        file.unlink(missing_ok=True)


def kept_steps(gradients: Path) -> list[int]:
    """The steps that are kept whole: the messages are written last."""
    numbers = (path.parent.name.removeprefix("step-") for path in gradients.glob(f"step-*/{MESSAGES}"))
    return sorted(int(number) for number in numbers if number.isdecimal())


class KeptPart(NamedTuple):
    """A part of a gradient, as one rank had it."""

    rank: int
    box: Box
    file: Path
    begin: int
    dtype: str

    def values(self) -> NDArray[Any]:
        """Of the box's shape."""
        dtype = np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))
        flat = np.fromfile(self.file, dtype, self.box.size, offset=self.begin)
        return flat.reshape(self.box.shape)


class KeptStep:
    """A step as a run has kept it. Raises CheckpointError (PP-E645) where a file is damaged."""

    def __init__(self, gradients: Path, step: int) -> None:
        self.path = step_directory(gradients, step)
        self.parts: dict[str, list[KeptPart]] = {}
        """By the parameter's name, ranks in order."""
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
            message = f"step {step} of the gradients that were kept cannot be read: {type(error).__name__}: {error}"
            raise CheckpointError(Problem("PP-E645", message, remedy, str(self.path))) from None

    def whole(self, name: str) -> NDArray[Any]:
        """A gradient put together of the first rank's parts that has each."""
        parts = self.parts[name]
        shape = self.shapes[name]
        whole = np.zeros(shape, parts[0].values().dtype)
        for part in reversed(parts):
            whole[part.box.within((0,) * len(shape))] = part.values()
        return whole


def _whole_shape(name: str, parts: Sequence[KeptPart]) -> Shape:
    """The extents of a gradient with these parts. Raises ValueError where they cannot be all of it."""
    shape = tuple(map(max, zip(*(part.box.end for part in parts), strict=True)))
    if sum(part.box.size for part in parts) < prod(shape):
        raise ValueError(f"{name} is not whole")
    return shape


def _parts_of(file: Path) -> Iterator[tuple[str, KeptPart]]:
    rank = int(file.stem.removeprefix("rank-"))
    for key, stored in read_header(file).items():
        name, _, offset = key.removeprefix("gradient.").partition("@")
        place = tuple(map(int, offset.split(","))) if offset else (0,) * len(stored.shape)
        if min((0, *place)) < 0:
            raise ValueError(f"{key} begins before its tensor")
        yield name, KeptPart(rank, Box(place, stored.shape), file, stored.offset, _NUMPY[stored.dtype])
