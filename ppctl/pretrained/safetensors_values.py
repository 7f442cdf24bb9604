"""Values of safetensors files: canonical tensors out of a Hugging Face directory, and tensors into shards.

No more than one tensor is ever in memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ppctl.checkpoint.disk import header_of
from ppctl.checkpoint.shards import values_of, whole_shards
from ppctl.checkpoint.tensor_parts import TensorPart
from ppctl.errors import CheckpointError, Problem
from ppctl.families.directory import SCALE, ModelDirectory
from ppctl.families.safetensors import INDEX, SINGLE
from ppctl.runs.checkpoint_folder import sync

_READ_AS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.bfloat16,
}
"""The dtype that each stored one is read as: 8-bit matrices are multiplied by their blocks' scales."""


class DirectoryReader:
    """Reads tensors by canonical name; files are mapped, not loaded."""

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}

    def spec(self, name: str) -> Tensor:
        """Shape and dtype that `tensor` will give, on the meta device."""
        stored = self.directory.stored[self.directory.names[name]]
        return torch.empty(stored.shape, dtype=_READ_AS[stored.dtype], device="meta")

    def tensor(self, name: str) -> Tensor:
        """One canonical tensor, on the CPU."""
        return self.stored(self.directory.names[name])

    def stored(self, name: str) -> Tensor:
        """One tensor by its stored name."""
        tensor = self._get(name)
        if self.directory.stored[name].dtype == "F8_E4M3":
            return dequantised(tensor, self._get(name + SCALE), self.directory.block)
        return tensor

    def check_copies(self) -> None:
        """Compare the stored copies of tables with their originals: training keeps one of them. Raises CheckpointError
        (PP-E524) naming the copies that differ."""
        directory = self.directory
        unequal = [name for name, of in directory.copies.items() if not torch.equal(self.stored(name), self.tensor(of))]
        if unequal:
            message = f"{directory.path} holds copies of the embedding or the output that differ from them"
            remedy = "leave multi-token prediction out: --no-mtp, or model.mtp_num_layers=null"
            raise CheckpointError(Problem("PP-E524", message, remedy, "\n".join(unequal)))

    def _get(self, name: str) -> Tensor:
        file = self.directory.stored[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._files[file].get_tensor(name)
        return tensor


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """bfloat16 [r, c] of a matrix in 8-bit floats and one float32 scale per block [ceil(r / R), ceil(c / C)]."""
    rows, columns = weight.shape
    factors = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * factors).bfloat16()


# Writing


SHARD = 5 * 10**9
"""Bytes of one file, as Hugging Face cuts them."""
_PLACE = 64
"""Values begin at a multiple of so many bytes, a processor's widest read, as tensors in memory do. Who maps the file
reads weights where they lie, and products of the same numbers round by their place in memory."""


def write_shards(directory: Path, parts: Sequence[TensorPart], tensors: Iterable[Tensor], shard: int = SHARD) -> int:
    """Write whole `tensors`, which come in the order of `parts`, and after them the index; returns the bytes of all.
    Raises ValueError if a tensor is not what its part says."""
    files = list(_cut(parts, shard))
    values = iter(tensors)
    places: dict[str, str] = {}
    for number, inside in enumerate(files, 1):
        file = SINGLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        _write(directory / file, inside, values)
        places |= dict.fromkeys((part.name for part in inside), file)
    total = sum(part.bytes for part in parts)
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        sync(directory / INDEX)
    return total


def _cut(parts: Sequence[TensorPart], shard: int) -> Iterator[list[TensorPart]]:
    inside: list[TensorPart] = []
    for part in parts:
        if inside and sum(other.bytes for other in inside) + part.bytes > shard:
            yield inside
            inside = []
        inside.append(part)
    yield inside


def _write(file: Path, parts: Sequence[TensorPart], tensors: Iterator[Tensor]) -> None:
    with file.open("wb") as stream:
        stream.write(header_of(parts, aligned=_PLACE)[0])
        for part in parts:
            (given,) = whole_shards({part.name: next(tensors)})
            if given.part != part:
                raise ValueError(f"{part.name} is {given.part}, not {part}")
            stream.write(values_of(given.tensor))
    sync(file)
