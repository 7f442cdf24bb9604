"""Boxes of tensors as a rank holds them, by canonical global name, and a copy of them in host memory.

The copy is what a save beside training writes, and the node's writer reads.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Mapping, Sequence
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.tensor_parts import TensorPart, Values, places, size_of, values_in
from ppctl.errors import CheckpointError, Problem
from ppctl.host.private_files import open_file

if sys.platform == "linux":
    from mmap import MAP_POPULATE, MAP_SHARED


class Shard(NamedTuple):
    """A box of a tensor as this rank holds it."""

    name: str
    shape: tuple[int, ...]
    """The whole tensor's shape."""
    offset: tuple[int, ...]
    """The position of the box's first element in the whole tensor."""
    tensor: Tensor
    """The values, in the box's shape: a view of a tensor that training uses, or a copy."""

    @property
    def part(self) -> TensorPart:
        """The part of the tensor that this shard is, without values."""
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return TensorPart(self.name, tuple(self.shape), dtype, Box(tuple(self.offset), tuple(self.tensor.shape)))


def whole_shards(tensors: Mapping[str, Tensor]) -> list[Shard]:
    """Shards of tensors that this rank holds whole, by canonical global name."""
    return [Shard(name, tuple(each.shape), (0,) * each.dim(), each) for name, each in tensors.items()]


def values_of(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, row-major: no copy if it is contiguous and on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


class HostMemory:
    """Memory for a copy of the values of `shards`, allocated and touched now. Raises CheckpointError (PP-E511).

    The memory is an anonymous file (memfd), freed when the last process that maps it ends, or `file`, whose contents
    from an earlier process are kept. For shards on a GPU the memory is pinned.
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
            # Memory that is unmapped while pinned keeps its addresses pinned: the next memory there would be refused.
            weakref.finalize(self, _unpin, memory, next(iter(devices))).atexit = False

    @property
    def bytes(self) -> memoryview:
        """The whole memory, as bytes."""
        return memoryview(self._map)

    @torch.no_grad()
    def fill(self, shards: Sequence[Shard]) -> None:
        """Copy the values in this memory into `shards`, which are of the same parts."""
        for own, shard in zip(self._copies, shards, strict=True):
            shard.tensor.copy_(own)

    @property
    def values(self) -> Values:
        """The values that were copied last, by the number of their shard."""
        return values_in(memoryview(self._map), self.parts)

    @torch.no_grad()
    def copy(self, shards: Sequence[Shard]) -> list[torch.cuda.Event]:
        """Copy the values of `shards`, of the same parts, into this memory. A copy from a GPU is complete when `wait`
        returns for the returned events; the host does not wait for it, but what a GPU computes after this call does."""
        for device, stream in self._streams.items():
            stream.wait_stream(torch.cuda.current_stream(device))
        for out, shard in zip(self._copies, shards, strict=True):
            with torch.cuda.stream(self._streams.get(shard.tensor.device)):  # None: the stream stays the current one
                out.copy_(shard.tensor, non_blocking=True)
        events = []
        for device, stream in self._streams.items():
            # A blocking event leaves the core to training's own host while a thread waits.
            events.append(stream.record_event(torch.cuda.Event(blocking=True)))
            torch.cuda.current_stream(device).wait_stream(stream)
        return events

    def wait(self, events: Sequence[torch.cuda.Event]) -> None:
        """Wait until the copy that these events mark is complete; any thread may call this. A new thread's current
        device is GPU 0: a CUDA call without `device` would create a context of 0.5 GiB there."""
        for device, event in zip(self._streams, events, strict=True):
            with torch.cuda.device(device):
                event.synchronize()


def shared_file(size: int, file: Path | None) -> tuple[int, mmap]:
    """Return the descriptor (-1 without memfd) and the mapping of `file`, which lies in memory, or of an unnamed file;
    gives it `size` bytes. Raises OSError if there is no room."""
    if file is not None:
        descriptor = open_file(file, os.O_RDWR | os.O_CREAT)
    elif sys.platform != "linux":
        return -1, mmap(-1, size)  # this process's alone: where there is no memfd, no writer can be reached either
    else:
        descriptor = os.memfd_create("ppctl-checkpoint")
    os.ftruncate(descriptor, size)
    os.posix_fallocate(descriptor, 0, size)  # reports missing room here instead of as SIGBUS later; keeps the contents
    return descriptor, mmap(descriptor, size, flags=MAP_SHARED | MAP_POPULATE)


def _pin(memory: torch.Tensor) -> None:
    runtime = torch.cuda.cudart()
    result = int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if result:
        why = f"CUDA cannot pin it, {runtime.cudaGetErrorString(runtime.cudaError(result))}"
        raise CheckpointError(_no_room(memory.numel(), why))


def _unpin(memory: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):  # memory may be freed by any thread
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())


def _no_room(size: int, why: str) -> Problem:
    message = f"no host memory for a copy of what a rank saves, {size / 2**30:.2f} GiB: {why}"
    return Problem("PP-E511", message, "checkpoint.async=false")
