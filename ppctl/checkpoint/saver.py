"""Saving: every rank writes what it holds; rank 0 seals the checkpoint, names it, moves `latest`, and deletes old ones.

Training waits for a save, or goes on beside it (decision 50); or one process saves tensor by tensor.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ppctl.checkpoint import disk
from ppctl.checkpoint.disk import problems_of
from ppctl.checkpoint.local_copies import LocalCopies
from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.checkpoint.run_state import state_text
from ppctl.checkpoint.shards import HostMemory, Shard, values_of, whole_shards
from ppctl.checkpoint.tensor_parts import TensorPart, Values, packed_parts
from ppctl.checkpoint.writer import NO_WRITER, NodeWriter, WriterAddress
from ppctl.errors import CheckpointError, Problem
from ppctl.runs import checkpoint_folder, fence

R = TypeVar("R")


class Saver:
    """Saves the shards of the ranks of a process group (None: the default group) into one directory of checkpoints.
    Ranks agree on which of them writes each part, and again when parts change. Without a `writer` (a node's process
    that writes for its ranks) each rank writes by itself."""

    def __init__(
        self,
        directory: Path,
        *,
        keep: int,
        keep_every: int = 0,
        keep_best: int = 0,
        process_group: dist.ProcessGroup | None = None,
        writer: NodeWriter | None = None,
    ) -> None:
        self.directory, self._kept = directory, (keep, keep_every, keep_best)
        self.ranks = AgreeingRanks(process_group)
        self._writer = writer
        self._parts: list[TensorPart] | None = None
        self._own = b""
        """For each of the parts: 1 if this rank writes it."""
        self._all_parts: list[bytes] = []
        """On rank 0: the packed parts of every rank."""

    def save(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any]) -> Path:
        """Write step-`step`; called by all ranks together, returns its path on all of them.

        Any two parts of a tensor are equal boxes (copies, with equal bits) or do not overlap; together the parts are
        the whole tensor. `state` must be JSON-able and equal on all ranks; rank 0's is kept.

        Raises CheckpointError on every rank if a rank fails: unequal copies, a full disk, no permission. Then, as after
        a crash at any moment, the earlier checkpoints and `latest` are as they were.
        """
        held = list(shards)
        return self.write(
            step, [shard.part for shard in held], lambda number: values_of(held[number].tensor), state_text(state)
        )

    def write(self, step: int, parts: list[TensorPart], values: Values, state: bytes) -> Path:
        """Save as `save` does, from values that may lie anywhere and the bytes of `state.json`; returns the path."""
        directory, temporary = self.directory, checkpoint_folder.temporary_path(self.directory, step)
        what = f"write the checkpoint {checkpoint_folder.step_path(directory, step)}"
        self._prepare(what, step, parts)
        try:
            path = self.ranks.agree(
                what,
                lambda: self._do(what, disk.write, self.ranks.rank, temporary, parts, self._own, values),
                lambda reports: self._do(what, disk.commit, directory, step, self._all_parts, reports, state),
                each=bytes,
                result=Path,
            )
        except CheckpointError:
            if self.ranks.rank == 0:
                self._do(what, disk.discard, temporary)
            raise
        what = "delete old checkpoints"
        self.ranks.agree(
            what,
            lambda: None,
            lambda _: self._do(what, disk.retain, directory, step, *self._kept),
        )
        return path

    def _prepare(self, what: str, step: int, parts: list[TensorPart]) -> None:
        """Make the directory; agree on each part's writer, unless every rank still holds the parts of the last save."""
        changed = parts != self._parts

        def begin(changes: list[bool]) -> bool:
            if not any(changes):
                self._do(what, disk.prepare, self.directory, step)
            return any(changes)

        if not self.ranks.agree(what, lambda: changed, begin, each=bool, result=bool):
            return

        def choose(all_parts: list[bytes]) -> tuple[bytes, ...]:
            own = self._do(what, disk.choose, all_parts)
            self._do(what, disk.prepare, self.directory, step)
            self._all_parts = all_parts
            return own

        own = self.ranks.agree(what, lambda: packed_parts(parts), choose, each=bytes, result=tuple[bytes, ...])
        self._own, self._parts = own[self.ranks.rank], parts

    def _do(self, what: str, work: Callable[..., R], *arguments: Any) -> R:
        fence.check(at_once=True)
        return work(*arguments) if self._writer is None else self._writer.do(what, work, *arguments)


def save_streamed(
    directory: Path, step: int, tensors: Mapping[str, Tensor], read: Callable[[str], Tensor], state: Mapping[str, Any]
) -> Path:
    """Write `directory`/step-`step` from one process, tensor by tensor; returns its path. `tensors` are on the meta
    device, by canonical global name; `read` is called for each once. Raises what `read` raises, and OSError: then, as
    after a crash, nothing is left that would be read."""
    parts = [shard.part for shard in whole_shards(tensors)]
    all_parts = [packed_parts(parts)]
    temporary = checkpoint_folder.prepare(directory, step)
    try:
        (own,) = disk.choose(all_parts)
        report = disk.write(0, temporary, parts, own, lambda number: values_of(read(parts[number].name)))
        return disk.commit(directory, step, all_parts, [report], state_text(state))
    except BaseException:
        checkpoint_folder.discard(temporary)
        raise


# Beside training


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete."""

    step: int
    path: Path
    seconds: float
    """Seconds from the beginning of the save, with its copy in memory, to the end."""


class BackgroundSaver:
    """Saves, one at a time, beside what the ranks of `process_group` do; no other thread may use that group.

    A step waits until its rank's shards are copied. A thread then saves the copy; nearly all the time it waits for the
    node's writer or for other ranks.

    `address` is that of the node's writer; without one, each rank's thread writes by itself. Memory for one copy of
    `shards` is made and touched now. `warn` is called, on any thread, with the problem if the writer is lost. With
    `local` the copy outlives the process. `keeps` says which checkpoints stay, as for `Saver`. Raises CheckpointError
    (PP-E511) if there is no memory.
    """

    def __init__(
        self,
        directory: Path,
        shards: Iterable[Shard],
        *,
        process_group: dist.ProcessGroup | None = None,
        address: WriterAddress = NO_WRITER,
        local: LocalCopies | None = None,
        warn: Callable[[Problem], None],
        **keeps: int,
    ) -> None:
        rank, self.local = dist.get_rank() if dist.is_initialized() else 0, local
        self.memory = HostMemory(list(shards), None if local is None else local.own.values)
        self._writer = NodeWriter(address, rank, self.memory.descriptor, self.memory.size, warn)
        self._saver = Saver(directory, process_group=process_group, writer=self._writer, **keeps)
        self._thread: Thread | None = None
        self._saved: deque[Saved] = deque()
        self._error: CheckpointError | None = None
        self.under_way: int | None = None
        """The step that is being saved."""

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed: then `finish` raises on all ranks."""
        return self._error is not None

    def begin(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any], *, to_disk: bool = True) -> None:
        """Wait for the previous save, as `finish` does; then copy `shards` and write them as step-`step` in the
        background, or without `to_disk` keep only the local copy. All ranks call this together. `shards` and `state`
        are as in `Saver.save`. Raises ValueError if their parts are not `memory.parts`."""
        self.finish()
        began, held, text = time.perf_counter(), list(shards), state_text(state)
        if [shard.part for shard in held] != self.memory.parts:
            raise ValueError("the parts that a rank saves in the background cannot change")
        if self.local is not None:
            self.local.own.forget()
        copied = self.memory.copy(held)
        self.under_way = step
        arguments = step, text, began, copied, to_disk
        self._thread = Thread(target=self._save, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, limit: float | None = None) -> bool:
        """Wait (at most `limit` seconds) for the save under way; returns whether it is over. Raises as `Saver.save`."""
        if self._thread is not None:
            self._thread.join(limit)
            if self._thread.is_alive():
                return False
            self._thread = self.under_way = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return True

    def news(self) -> list[Saved]:
        """The checkpoints that have become complete since the last call; does not wait."""
        return [self._saved.popleft() for _ in range(len(self._saved))]

    def close(self) -> None:
        """Close the connection to the writer; no save may follow."""
        self._writer.close()

    def _save(self, step: int, state: bytes, began: float, copied: list[torch.cuda.Event], to_disk: bool) -> None:
        """Write one step; runs in the thread. Keeps an error, which `finish` raises."""
        try:
            self.memory.wait(copied)
            if self.local is not None:
                self.local.copy(step, self.memory.parts, state, self.memory.bytes)
            if to_disk:
                path = self._saver.write(step, self.memory.parts, self.memory.values, state)
                self._saved.append(Saved(step, path, time.perf_counter() - began))
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # of the process group: another rank has gone
            self._error = CheckpointError(problems_of(error, f"save step {step}", self._saver.ranks.rank))
