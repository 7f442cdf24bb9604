"""Saving: every rank writes what it holds, rank 0 seals it; then it gets its name, `latest`, and old ones are deleted.

Knows the order of the steps. Must not know models, optimizers or the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from ppctl import checkpoint_folder
from ppctl.checkpoint import shard_file
from ppctl.checkpoint.agreement import AgreeingRanks
from ppctl.checkpoint.manifest import FileRecord, Manifest, ShardRecord, TensorRecord, record_whole
from ppctl.checkpoint.shard_file import Part
from ppctl.checkpoint.shards import Shard, Writers, check_copies, choose_writers, digests, values_of
from ppctl.checkpoint_folder import MANIFEST, STATE
from ppctl.errors import CheckpointError, Problem


class _Written(NamedTuple):
    """What a rank has done: its file, where its parts are in it, and the digests of all shards that it holds."""

    files: dict[str, FileRecord]
    places: dict[int, ShardRecord]
    """By the number of the shard."""
    digests: list[tuple[str, ...]]


class Saver:
    """Saves the shards of the ranks of a process group (None: the default one) into one directory of checkpoints.

    Which rank writes which part is agreed on once, and again when a rank's parts have changed.
    """

    def __init__(
        self, directory: Path, *, keep: int, keep_every: int = 0, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        self.ranks = AgreeingRanks(process_group)
        self._parts: list[Part] | None = None
        self._own = b""
        self._writers: Writers | None = None  # on rank 0, which seals

    def save(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any]) -> Path:
        """Write step-`step`; called by all ranks together, returns its path on all of them.

        Parts of one tensor on several ranks are equal boxes (copies, which must be bit-equal) or do not overlap, and
        are all of it. `state` must be JSON-able and equal on all ranks; rank 0's is kept.

        Raises CheckpointError on every rank if anything fails on any: unequal copies, a full disk, no permission.
        Then, as after a crash at any moment, the earlier checkpoints and `latest` are as they were.
        """
        what = f"write the checkpoint {checkpoint_folder.step_path(self.directory, step)}"
        text = (json.dumps(dict(state), indent=1) + "\n").encode()
        held = list(shards)
        self._choose_writers(what, held)
        self.ranks.agree(what, lambda: None, lambda _: checkpoint_folder.prepare(self.directory, step))
        temporary = checkpoint_folder.temporary_path(self.directory, step)

        def finish(written: list[_Written]) -> Path:
            assert self._writers is not None
            seal(temporary, manifest_of(step, self._writers, written), text)
            return checkpoint_folder.publish(self.directory, step)

        try:
            path = self.ranks.agree(what, lambda: self._write(temporary, held), finish)
        except CheckpointError:
            if self.ranks.rank == 0:
                checkpoint_folder.discard(temporary)
            raise
        self.ranks.agree("delete old checkpoints", lambda: None, lambda _: self._retain(step))
        return path

    def _retain(self, step: int) -> None:
        checkpoint_folder.retain(self.directory, step, self.keep, self.keep_every)

    def _choose_writers(self, what: str, held: Sequence[Shard]) -> None:
        """Agree on who writes what, unless every rank holds the parts that it held at the last save."""
        parts = [shard.part for shard in held]
        changed = parts != self._parts
        if not self.ranks.agree(what, lambda: changed, any):
            return

        def choose(all_parts: list[list[Part]]) -> tuple[bytes, ...]:
            self._writers = choose_writers(all_parts)
            return self._writers.own

        self._own = self.ranks.agree(what, lambda: parts, choose)[self.ranks.rank]
        self._parts = parts

    def _write(self, directory: Path, held: Sequence[Shard]) -> _Written:
        """Write this rank's share, and read the rest for its digests."""
        mine = [number for number, own in enumerate(self._own) if own]
        # The widest elements first: all of them then lie at multiples of their size.
        mine.sort(key=lambda number: -held[number].tensor.element_size())
        files, places = {}, dict[int, ShardRecord]()
        if mine:
            path = directory / shard_file.file_name(self.ranks.rank)
            values = (values_of(held[number].tensor) for number in mine)
            files[path.name], written = shard_file.write(path, [held[number].part for number in mine], values)
            places = dict(zip(mine, written, strict=True))
        found = [places[number].digests if number in places else digests(shard) for number, shard in enumerate(held)]
        return _Written(files, places, found)


def save(
    directory: Path,
    step: int,
    shards: Iterable[Shard],
    state: Mapping[str, Any],
    *,
    keep: int,
    keep_every: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """A single save, as by a `Saver`. Without torch.distributed this process is alone."""
    saver = Saver(directory, keep=keep, keep_every=keep_every, process_group=process_group)
    return saver.save(step, shards, state)


def manifest_of(step: int, writers: Writers, written: Sequence[_Written]) -> Manifest:
    """The manifest of what all ranks have written. Raises CheckpointError (PP-E504) where copies differ."""
    check_copies(writers, [each.digests for each in written])
    shards: dict[str, list[ShardRecord]] = {}
    kinds: dict[str, tuple[tuple[int, ...], str]] = {}
    for part, holders in writers.holders.items():
        rank, number = holders[0]
        shards.setdefault(part.name, []).append(written[rank].places[number])
        kinds[part.name] = part.whole, part.dtype
    tensors = {
        name: TensorRecord(*kinds[name], tuple(sorted(found, key=lambda shard: shard.box)))
        for name, found in shards.items()
    }
    files = {name: record for each in written for name, record in each.files.items()}
    return Manifest(step, files, tensors)


def seal(path: Path, manifest: Manifest, state: bytes) -> None:
    """Rank 0's part: state and manifest, synced, once every file is seen from here with all its bytes."""
    unseen = [name for name, record in manifest.files.items() if _size(path / name) != record.bytes]
    if unseen:
        message = f"files that other ranks wrote cannot be seen from rank 0: {', '.join(sorted(unseen))}"
        remedy = "log.dir=DIR on a file system that all hosts share"
        raise CheckpointError(Problem("PP-E508", message, remedy, place=str(path)))
    _write_synced(path / STATE, state)
    files = {**manifest.files, STATE: record_whole(state)}
    _write_synced(path / MANIFEST, Manifest(manifest.step, files, manifest.tensors).to_text().encode())
    checkpoint_folder.sync(path)


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else -1


def _write_synced(path: Path, text: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
