"""Safetensors in shards, written as the tensors come: no more than one of them is ever in memory.

Knows the format and the index. Must not know models or checkpoints. The library writes a file from a dictionary that
holds all of it; a header is known beforehand here, since every shape is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ppctl.checkpoint_folder import sync
from ppctl.families.safetensors import INDEX, SINGLE

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
SHARD = 5 * 10**9
"""Bytes of one file, as Hugging Face cuts them."""
_PLACE = 64
"""Values begin at a multiple of so many bytes, a processor's widest read, as tensors in memory do."""


class Spec(NamedTuple):
    """What is to be written under one name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of its values."""
        count = self.dtype.itemsize
        for extent in self.shape:
            count *= extent
        return count


def write_shards(directory: Path, specs: Sequence[Spec], tensors: Iterable[Tensor], shard: int = SHARD) -> int:
    """Write `tensors`, which come in the order of `specs`, and after them the index; returns the bytes of all values.

    Raises ValueError where a tensor is not what its spec says.
    """
    shards = list(_cut(specs, shard))
    values = iter(tensors)
    places: dict[str, str] = {}
    for number, part in enumerate(shards, 1):
        file = SINGLE if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write(directory / file, part, values)
        places |= dict.fromkeys((spec.name for spec in part), file)
    total = sum(spec.bytes for spec in specs)
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        sync(directory / INDEX)
    return total


def _cut(specs: Sequence[Spec], shard: int) -> Iterator[list[Spec]]:
    part: list[Spec] = []
    for spec in specs:
        if part and sum(other.bytes for other in part) + spec.bytes > shard:
            yield part
            part = []
        part.append(spec)
    yield part


def _write(file: Path, specs: Sequence[Spec], tensors: Iterator[Tensor]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        header[spec.name] = {"dtype": DTYPES[spec.dtype], "shape": spec.shape, "data_offsets": [end, end + spec.bytes]}
        end += spec.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    # Who maps the file reads weights where they lie, and products of the same numbers round by their place in memory.
    text += b" " * (-(len(text) + 8) % _PLACE)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for spec in specs:
            tensor = next(tensors)
            if (tuple(tensor.shape), tensor.dtype) != (spec.shape, spec.dtype):
                raise ValueError(f"{spec.name} is {tensor.dtype}{list(tensor.shape)}, not {spec.dtype}{spec.shape}")
            stream.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    sync(file)
