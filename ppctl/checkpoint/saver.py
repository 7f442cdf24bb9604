"""Saving: every rank writes what it holds, rank 0 seals it; then it gets its name, `latest`, and old ones are deleted.

Knows the order of the steps, and what all ranks agree on. Must not know models, optimizers or the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ppctl import checkpoint_folder
from ppctl.checkpoint.agreement import AgreeingRanks
from ppctl.checkpoint.disk import Disk, Values
from ppctl.checkpoint.holders import packed_parts
from ppctl.checkpoint.shard_file import Part
from ppctl.checkpoint.shards import Shard, values_of
from ppctl.checkpoint.state import state_text
from ppctl.errors import CheckpointError


class Saver:
    """Saves the shards of the ranks of a process group (None: the default one) into one directory of checkpoints.

    Which rank writes which part is agreed on once, and again when a rank's parts have changed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_every: int = 0,
        process_group: dist.ProcessGroup | None = None,
        disk: Disk | None = None,
    ) -> None:
        self.directory, self.keep, self.keep_every = directory, keep, keep_every
        self.ranks = AgreeingRanks(process_group)
        self.disk = Disk(self.ranks.rank) if disk is None else disk
        self._parts: list[Part] | None = None

    def save(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any]) -> Path:
        """Write step-`step`; called by all ranks together, returns its path on all of them.

        Parts of one tensor on several ranks are equal boxes (copies, which must be bit-equal) or do not overlap, and
        are all of it. `state` must be JSON-able and equal on all ranks; rank 0's is kept.

        Raises CheckpointError on every rank if anything fails on any: unequal copies, a full disk, no permission.
        Then, as after a crash at any moment, the earlier checkpoints and `latest` are as they were.
        """
        held = list(shards)
        return self.write(
            step, [shard.part for shard in held], lambda number: values_of(held[number].tensor), state_text(state)
        )

    def write(self, step: int, parts: list[Part], values: Values, state: bytes) -> Path:
        """The same with the values of parts, wherever they lie, and the bytes of `state.json`."""
        directory, temporary = self.directory, checkpoint_folder.temporary_path(self.directory, step)
        what = f"write the checkpoint {checkpoint_folder.step_path(directory, step)}"
        self._prepare(what, step, parts)
        try:
            path = self.ranks.agree(
                what,
                lambda: self.disk.write(temporary, values),
                lambda written: self.disk.commit(directory, step, written, state),
                each=bytes,
                result=Path,
            )
        except CheckpointError:
            if self.ranks.rank == 0:
                self.disk.discard(temporary)
            raise
        self.ranks.agree(
            "delete old checkpoints",
            lambda: None,
            lambda _: self.disk.retain(directory, step, self.keep, self.keep_every),
        )
        return path

    def _prepare(self, what: str, step: int, parts: list[Part]) -> None:
        """Make the directory, and agree on who writes what, unless every rank holds the parts of the last save."""
        changed = parts != self._parts

        def begin(changes: list[bool]) -> bool:
            if not any(changes):
                self.disk.prepare(self.directory, step)
            return any(changes)

        if not self.ranks.agree(what, lambda: changed, begin, each=bool, result=bool):
            return

        def choose(all_parts: list[bytes]) -> tuple[bytes, ...]:
            own = self.disk.choose(all_parts)
            self.disk.prepare(self.directory, step)
            return own

        own = self.ranks.agree(what, lambda: packed_parts(parts), choose, each=bytes, result=tuple[bytes, ...])
        self.disk.hold(packed_parts(parts), own[self.ranks.rank])
        self._parts = parts


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
