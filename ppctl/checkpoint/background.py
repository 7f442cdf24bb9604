"""Saves beside training: a step waits for one copy of what its rank holds, and the rest happens in the background.

A thread of every rank goes through the order of a save (`saver`), on a process group of its own; nearly all the time
it waits, for the node's writer or for other ranks. Must not know steps of training, models or the run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from ppctl.checkpoint.agreement import problems_of
from ppctl.checkpoint.host_memory import HostMemory
from ppctl.checkpoint.local_copies import LocalCopies
from ppctl.checkpoint.saver import Saver
from ppctl.checkpoint.shards import Shard
from ppctl.checkpoint.state import state_text
from ppctl.checkpoint.writer import NO_WRITER, RemoteDisk, WriterAddress
from ppctl.errors import CheckpointError, Problem


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint that is complete."""

    step: int
    path: Path
    seconds: float
    """From the begin of the save, its copy included, to the end."""


class BackgroundSaver:
    """Saves, one at a time, beside what the ranks of `process_group` do; no other thread may use that group.

    `address` is that of the node's writer (without one, ranks write themselves, from a thread). `shards` are what is
    saved, for their sizes: memory for one copy is made and touched now. `warn` takes the loss of the writer, on any
    thread. With `local` the copy outlives the process. Raises CheckpointError (PP-E511) where there is no memory.
    """

    def __init__(
        self,
        directory: Path,
        shards: Iterable[Shard],
        *,
        keep: int,
        keep_every: int = 0,
        process_group: dist.ProcessGroup | None = None,
        address: WriterAddress = NO_WRITER,
        local: LocalCopies | None = None,
        warn: Callable[[Problem], None],
    ) -> None:
        rank, self.local = dist.get_rank() if dist.is_initialized() else 0, local
        self.memory = HostMemory(list(shards), None if local is None else local.own.values)
        self.disk = RemoteDisk(address, rank, self.memory.descriptor, self.memory.size, warn)
        self._saver = Saver(directory, keep=keep, keep_every=keep_every, process_group=process_group, disk=self.disk)
        self._thread: Thread | None = None
        self._saved: deque[Saved] = deque()
        self._error: CheckpointError | None = None
        self.under_way: int | None = None
        """The step that is being saved."""

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed: `finish` will raise, on all ranks."""
        return self._error is not None

    def begin(self, step: int, shards: Iterable[Shard], state: Mapping[str, Any], *, to_disk: bool = True) -> None:
        """Copy what is saved as step-`step`, and write it in the background; called by all ranks together.

        Waits first for the save before this one, as `finish` does. `shards` and `state` are as of `Saver.save`. Not
        `to_disk`: only the local copy.
        """
        self.finish()
        began, held, text = time.perf_counter(), list(shards), state_text(state)
        if [shard.part for shard in held] != self.memory.parts:
            raise ValueError("the shape of what a rank saves in the background cannot change")
        if self.local is not None:
            self.local.forget()
        copied = self.memory.copy(held)
        self.under_way = step
        arguments = step, text, began, copied, to_disk
        self._thread = Thread(target=self._save, args=arguments, name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self, limit: float | None = None) -> bool:
        """Wait for the save under way, at most `limit` seconds: whether it is over. Raises CheckpointError as
        `Saver.save` does."""
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
        """No save follows: the writer may end."""
        self.disk.close()

    def _save(self, step: int, state: bytes, began: float, copied: list[torch.cuda.Event], to_disk: bool) -> None:
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
