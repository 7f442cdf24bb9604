"""Loading: strict in both directions, by byte ranges, in whatever cut the ranks are now.

Must not know models, optimizers or the cut that the checkpoint was saved in. A rank reads the chunks that hold what it
wants, one after the other, and checks the digest of each before it takes anything from it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_128

from ppctl.checkpoint.agreement import AgreeingRanks
from ppctl.checkpoint.boxes import Box, boxes_of_run, common
from ppctl.checkpoint.holders import check_tensors, text_of
from ppctl.checkpoint.manifest import (
    CHUNK,
    Manifest,
    ShardRecord,
    changed,
    check_files,
    checked_state,
    damaged,
    ranges,
    read_manifest,
    read_text,
)
from ppctl.checkpoint.shard_file import Part
from ppctl.checkpoint.shards import Shard
from ppctl.checkpoint_folder import STATE
from ppctl.errors import CheckpointError, Problem

_Kind = tuple[tuple[int, ...], str]


class CheckpointReader:
    """Reads tensors, and boxes of them, of one checkpoint by canonical global name. Holds one chunk besides."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self._chunk = bytearray(0)
        if manifest.format == 1:
            from ppctl.checkpoint.format_1 import Reader  # it loads torch's checkpoint library

            self._before: Reader | None = Reader(path, manifest)
        else:
            self._before = None

    def tensor(self, name: str) -> Tensor:
        """One tensor, on the CPU. Raises CheckpointError (PP-E503) where it is not what was saved."""
        record = self.manifest.tensors[name]
        tensor = torch.empty(record.shape, dtype=getattr(torch, record.dtype))
        self.fill(name, (0,) * len(record.shape), tensor)
        return tensor

    @torch.no_grad()
    def fill(self, name: str, offset: tuple[int, ...], out: Tensor) -> None:
        """Fill `out` with the box of a tensor that begins at `offset`, cast to the dtype of `out`.

        Raises CheckpointError (PP-E503) where the values are not those that were saved, and OSError.
        """
        wanted = Box(offset, tuple(out.shape))
        if self._before is not None:
            out.copy_(self._before.tensor(name)[wanted.within((0,) * len(offset))])
            return
        record, dtype = self.manifest.tensors[name], getattr(torch, self.manifest.tensors[name].dtype)
        for shard in record.shards:
            if common(shard.box, wanted) is not None:
                self._take(name, shard, dtype, wanted, out)

    def _take(self, name: str, shard: ShardRecord, dtype: torch.dtype, wanted: Box, out: Tensor) -> None:
        """Copy what `shard` has of the box `wanted` into `out`."""
        width, first = dtype.itemsize, shard.bytes[0]
        with open(self.path / shard.file, "rb", buffering=0) as stream:
            for begin, end, digest in shard.chunks():
                run = ((begin - first) // width, (end - first) // width)
                boxes = [(box, box.moved(shard.offset)) for box in boxes_of_run(shard.shape, *run)]
                if not any(common(placed, wanted) for _, placed in boxes):
                    continue
                values = torch.frombuffer(
                    self._checked(stream.fileno(), name, shard.file, begin, end, digest), dtype=dtype
                )
                taken = 0
                for box, placed in boxes:
                    here = values[taken : taken + box.size].view(box.shape)
                    taken += box.size
                    if shared := common(placed, wanted):
                        out[shared.within(wanted.offset)].copy_(here[shared.within(placed.offset)])

    def _checked(self, descriptor: int, name: str, file: str, begin: int, end: int, digest: str) -> memoryview:
        """The bytes of one chunk. They are overwritten by the next."""
        if len(self._chunk) < end - begin:
            self._chunk = bytearray(min(CHUNK, max(end - begin, 2 * len(self._chunk))))
        data = memoryview(self._chunk)[: end - begin]
        _read_into(descriptor, data, begin)
        if xxh3_128(data).hexdigest() != digest:
            raise CheckpointError(damaged(self.path, changed(file, begin, end, name)))
        return data


def load(path: Path, shards: Iterable[Shard], *, process_group: dist.ProcessGroup | None = None) -> dict[str, Any]:
    """Fill the shards in place from the checkpoint at `path`; called by all ranks together; returns the saved state.

    Each rank brings what it owns now. Raises CheckpointError on every rank if the checkpoint is missing or damaged, if
    the ranks together lack a tensor of it, or a part of one, or want one that it lacks, or if a shape or dtype differs.
    All but damaged values is found before the first tensor is filled.
    """
    ranks = AgreeingRanks(process_group)
    what, held = f"read the checkpoint {path}", list(shards)

    def fit(wanted: list[list[Part]]) -> tuple[bytes, dict[str, Any]]:
        text = read_text(path)
        manifest = read_manifest(path)
        _check_fit(path, manifest, {part for each in wanted for part in each})
        return text, checked_state(path, manifest)

    text, state = ranks.agree(what, lambda: [shard.part for shard in held], fit)
    manifest = Manifest.from_text(text)
    share = sorted(manifest.files)[ranks.rank :: ranks.size]
    ranks.agree(what, lambda: check_files(path, manifest, share), lambda _: None)
    ranks.agree(what, lambda: fill(CheckpointReader(path, manifest), held), lambda _: None)
    return state


def fill(reader: CheckpointReader, shards: Sequence[Shard]) -> None:
    """Fill shards, without other ranks. What several are equal boxes of is read once."""
    filled: dict[Part, Tensor] = {}
    for shard in shards:
        out = shard.tensor.detach()
        if (found := filled.get(shard.part)) is not None:
            out.copy_(found)
            continue
        reader.fill(shard.name, tuple(shard.offset), out)
        filled[shard.part] = out


def _check_fit(path: Path, manifest: Manifest, wanted: set[Part]) -> None:
    """Compare the checkpoint with all ranks' parts together."""
    kinds: dict[str, set[_Kind]] = {}
    for part in wanted:
        kinds.setdefault(part.name, set()).add((part.whole, part.dtype))
    problems = []
    if missing := kinds.keys() - manifest.tensors.keys():
        problems.append(_misfit(path, "lacks tensors of this model", ranges(missing)))
    if unexpected := manifest.tensors.keys() - kinds.keys():
        problems.append(_misfit(path, "has tensors that this model lacks", ranges(unexpected)))
    different = [
        f"{name}: {text_of(record.shape, record.dtype)} saved, {' and '.join(text_of(*o) for o in sorted(others))} here"
        for name, record in manifest.tensors.items()
        if (others := kinds.get(name, set()) - {(record.shape, record.dtype)})
    ]
    if different:
        problems.append(_misfit(path, "has tensors of another shape or dtype", different))
    if problems:
        raise CheckpointError(problems)
    check_tensors(wanted)


def _misfit(path: Path, fault: str, lines: list[str]) -> Problem:
    remedy = f"give the model the sizes that it was saved with: they are in '{path / STATE}'"
    return Problem("PP-E502", f"the checkpoint at {path} {fault}", remedy, place="\n".join(lines))


def _read_into(descriptor: int, data: memoryview, offset: int) -> None:
    """Fill `data` from a file; what is behind its end stays as it is, and is found by the digest."""
    while data and (count := os.preadv(descriptor, [data], offset)):
        data, offset = data[count:], offset + count
