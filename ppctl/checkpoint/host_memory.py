"""A copy of a rank's shards in host memory, which the node's writer reads.

Knows streams, events and pinned memory. Must not know files, ranks or when a copy is made.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from mmap import mmap
from pathlib import Path

import torch

from ppctl.checkpoint.disk import Values
from ppctl.checkpoint.shards import Shard
from ppctl.checkpoint.writer import places, size_of, values_in
from ppctl.errors import CheckpointError, Problem
from ppctl.private_files import open_file

if sys.platform == "linux":
    from mmap import MAP_POPULATE, MAP_SHARED


class HostMemory:
    """Room for the values of shards of these parts, made and touched once. Raises CheckpointError (PP-E511).

    A file without a name (memfd): who maps it keeps it, and the last one's end frees it. Or `file`, with what an
    earlier process has left in it. For a GPU it is pinned.
    """

    def __init__(self, shards: Sequence[Shard], file: Path | None = None) -> None:
        self.parts = [shard.part for shard in shards]
        where = places(self.parts)
        self.size = size_of(self.parts)
        try:
            self.descriptor, self._map = shared_file(self.size, file)
        except OSError as error:
            raise CheckpointError(_no_room(self.size, str(error.strerror))) from error
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        self._copies = [
            memory[begin:end].view(shard.tensor.dtype).view(shard.tensor.shape)
            for shard, (begin, end) in zip(shards, where, strict=True)
        ]
        devices = {shard.tensor.device for shard in shards if shard.tensor.is_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}
        if devices:
            # CUDA's own function: torch's pinned memory cannot be shared with a process that has no CUDA.
            _pin(memory)

    @property
    def bytes(self) -> memoryview:
        """All of it."""
        return memoryview(self._map)

    @torch.no_grad()
    def fill(self, shards: Sequence[Shard]) -> None:
        """Copy back into shards of the same parts."""
        for own, shard in zip(self._copies, shards, strict=True):
            shard.tensor.copy_(own)

    @property
    def values(self) -> Values:
        """What was copied last, by the number of its shard."""
        return values_in(memoryview(self._map), self.parts)

    @torch.no_grad()
    def copy(self, shards: Sequence[Shard]) -> list[torch.cuda.Event]:
        """Copy the values of shards of the same parts: on the CPU at once, from a GPU until `wait` returns.

        The host does not wait for a GPU. What it is asked to compute from now on waits for the copy.
        """
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for out, shard in zip(self._copies, shards, strict=True):
            with torch.cuda.stream(self._streams.get(shard.tensor.device)):  # None: nothing is changed
                out.copy_(shard.tensor, non_blocking=True)
        events = []
        for device, stream in self._streams.items():
            # A blocking event leaves the core to training's own host while a thread waits.
            events.append(stream.record_event(torch.cuda.Event(blocking=True)))
            torch.cuda.current_stream(device).wait_stream(stream)
        return events

    def wait(self, events: Sequence[torch.cuda.Event]) -> None:
        """Return when the copy with these events is there; on any thread.

        A new thread's device is the first one: what it asks of CUDA would make a context there, of half a GiB.
        """
        for device, event in zip(self._streams, events, strict=True):
            with torch.cuda.device(device):
                event.synchronize()


def shared_file(size: int, file: Path | None) -> tuple[int, mmap]:
    """A file, all of it in memory, and its mapping. Raises OSError where there is no room."""
    if file is not None:
        descriptor = open_file(file, os.O_RDWR | os.O_CREAT)
    elif sys.platform != "linux":
        return -1, mmap(-1, size)  # this process's alone: no writer can be reached there either
    else:
        descriptor = os.memfd_create("ppctl-checkpoint")
    os.ftruncate(descriptor, size)
    os.posix_fallocate(descriptor, 0, size)  # no room is an error here, and SIGBUS later; keeps what is there
    return descriptor, mmap(descriptor, size, flags=MAP_SHARED | MAP_POPULATE)


def _pin(memory: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()
    result = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if result:
        why = f"CUDA cannot pin it, {runtime.cudaGetErrorString(runtime.cudaError(result))}"
        raise CheckpointError(_no_room(memory.numel(), why))


def _no_room(size: int, why: str) -> Problem:
    message = f"no host memory for a copy of what a rank saves, {size / 2**30:.2f} GiB: {why}"
    return Problem("PP-E511", message, "checkpoint.async=false")
