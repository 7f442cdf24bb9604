"""Loading into ranks of any cut, by byte ranges; a tensor that only one side has is an error.

A rank reads the chunks that hold its values, one after the other, and checks each chunk's digest before use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.chunks import ChunkReader
from ppctl.checkpoint.manifest import Manifest, check_files, checked_manifest, read_text
from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.checkpoint.run_state import read_state
from ppctl.checkpoint.shards import Shard
from ppctl.checkpoint.tensor_parts import TensorPart, check_tensors, packed_parts, parts_of
from ppctl.checkpoint.verification import Kind, misfits
from ppctl.errors import CheckpointError


class CheckpointReader(ChunkReader):
    """Reads tensors, and boxes of them, of one checkpoint by canonical global name."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path, manifest)
        self._there: set[str] = set()

    def tensor(self, name: str) -> Tensor:
        """Return one tensor, on the CPU. Raises CheckpointError (PP-E503) if it is not what was saved, and OSError."""
        record = self.manifest.tensors[name]
        files = {shard.file for shard in record.shards} - self._there
        check_files(self.path, self.manifest, files)  # before memory is allocated as the manifest says
        self._there |= files
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype), device="cpu")
        self.fill(name, (0,) * len(record.shape), tensor)
        return tensor

    @torch.no_grad()
    def fill(self, name: str, offset: tuple[int, ...], out: Tensor) -> None:
        """Fill `out` with the box of a tensor that begins at `offset`, cast to the dtype of `out`. Raises
        CheckpointError (PP-E503) if the values are not the saved values, and OSError."""
        dtype = getattr(torch, self.manifest.tensors[name].dtype)
        for piece in self.pieces(name, Box(offset, tuple(out.shape))):
            values = torch.frombuffer(piece.data, dtype=dtype).view(piece.shape)
            out[piece.place].copy_(values[piece.taken])


def load(path: Path, shards: Iterable[Shard]) -> dict[str, Any]:
    """Fill the shards in place from the checkpoint at `path`; called by all ranks together; returns the saved state.

    Each rank passes the shards that it holds. Raises CheckpointError on every rank if the checkpoint is missing or
    damaged, if a tensor or a part of it is only in the checkpoint or only on the ranks, or if a shape or dtype differs;
    damaged values are found while tensors are filled, everything else before.
    """
    ranks = AgreeingRanks(None)
    what, held = f"read the checkpoint {path}", list(shards)

    def fit(wanted: list[bytes]) -> tuple[bytes, dict[str, Any]]:
        text = read_text(path)
        manifest = checked_manifest(path, text)
        parts, kinds = {part for each in wanted for part in parts_of(each)}, dict[str, set[Kind]]()
        for part in parts:
            kinds.setdefault(part.name, set()).add((part.whole, part.dtype))
        if problems := misfits(path, manifest, kinds):
            raise CheckpointError(problems)
        check_tensors(parts)
        return text, read_state(path, manifest)

    text, state = ranks.agree(
        what,
        lambda: packed_parts([shard.part for shard in held]),
        fit,
        each=bytes,
        result=tuple[bytes, dict[str, Any]],
    )
    manifest = Manifest.from_text(text)
    share = sorted(manifest.files)[ranks.rank :: ranks.size]
    ranks.agree(what, lambda: check_files(path, manifest, share), lambda _: None)
    ranks.agree(what, lambda: fill(CheckpointReader(path, manifest), held), lambda _: None)
    return state


def fill(reader: CheckpointReader, shards: Sequence[Shard]) -> None:
    """Fill shards in place, without other ranks; equal boxes are read once. Raises as `CheckpointReader.fill` does."""
    filled: dict[TensorPart, Tensor] = {}
    for shard in shards:
        out = shard.tensor.detach()
        if (equal := filled.get(shard.part)) is not None:
            out.copy_(equal)
            continue
        reader.fill(shard.name, tuple(shard.offset), out)
        filled[shard.part] = out
