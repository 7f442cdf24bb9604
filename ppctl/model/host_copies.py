"""Copies of storages between a device and host memory, and the buffers there."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

Event = torch.cuda.Event | None
"""A moment in the work of a GPU; None on the CPU, where everything is done at once."""


class Moved:
    """One storage: as bytes on the device, in a buffer on the host, or for a while on both."""

    __slots__ = ("device", "host", "size")

    def __init__(self, tensor: Tensor) -> None:
        flat = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.itemsize,), (1,), 0)
        self.device: Tensor | None = flat.view(torch.uint8)
        self.host: Tensor | None = None
        self.size = self.device.numel()


class _Free(NamedTuple):
    buffer: Tensor
    read: Event
    """The moment at which the tensor's bytes have been copied back."""


class HostBuffers:
    """Buffers in host memory, which are made once and used again; pinned for a GPU.

    They come in eight sizes for each power of two: how many rows an expert gets differs from step to step.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, deque[_Free]] = {}
        self.bytes = 0
        """Bytes of all buffers that were made."""

    def take(self, size: int) -> _Free:
        """The buffer of at least `size` bytes that was given back first, or a new one."""
        rounded = rounded_size(size)
        free = self._free.setdefault(rounded, deque())
        if free:
            return free.popleft()
        self.bytes += rounded
        return _Free(self._make(rounded), None)

    def give_back(self, buffer: Tensor, read: Event) -> None:
        """Release the buffer to other users once `read` has passed."""
        self._free[buffer.numel()].append(_Free(buffer, read))

    def multiply(self, times: int) -> None:
        """Have `times` as many as are there, all of them given back: to pin memory may wait for the device."""
        for size, free in self._free.items():
            missing = len(free) * (times - 1)
            self.bytes += missing * size
            free.extend(_Free(self._make(size), None) for _ in range(missing))

    def _make(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)


def rounded_size(size: int) -> int:
    """The size of the buffer that holds `size` bytes."""
    step = max(512, 1 << max(size.bit_length() - 4, 0))
    return -(-size // step) * step


class Copies:
    """Copies between a device and the host. On a GPU they run on two streams, one each way, and the host never waits.

    Meta tensors (`meta`) have no bytes on the host.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        on_gpu = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if on_gpu else None
        self._back = torch.cuda.Stream(device) if on_gpu else None
        self.buffers = HostBuffers(pinned=on_gpu)

    def out(self, items: Collection[Moved]) -> Event:
        """Start to copy out, after what the device was asked to compute so far. `wait` before the bytes there go."""
        with self._beside(self._out):
            for moved in items:
                assert moved.device is not None
                if self.device.type != "meta":
                    moved.host, read = self.buffers.take(moved.size)
                    if self._out is not None and read is not None:
                        self._out.wait_event(read)
                    moved.host[: moved.size].copy_(moved.device, non_blocking=True)
        return _mark(self._out)

    def back(self, items: Collection[Moved], out: Event) -> Event:
        """Start to copy back what `out` brought out. `wait` before it is read.

        The memory belongs to the stream that computes: that waits before it reads, and so before it frees.
        """
        for moved in items:
            moved.device = torch.empty(moved.size, dtype=torch.uint8, device=self.device)
        with self._beside(self._back):
            if self._back is not None and out is not None:
                self._back.wait_event(out)
            for moved in items:
                if moved.host is not None:
                    assert moved.device is not None
                    moved.device.copy_(moved.host[: moved.size], non_blocking=True)
        read = _mark(self._back)
        self.give_up(items, read)
        return read

    def give_up(self, items: Collection[Moved], read: Event) -> None:
        """Give the buffers of `items` back; others may write to them from `read` on."""
        for moved in items:
            if moved.host is not None:
                self.buffers.give_back(moved.host, read)
                moved.host = None

    def wait(self, event: Event) -> None:
        """Let what is computed from now on wait for an `out` or a `back`."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Run on `stream`, after what the device was asked to compute so far."""
        if stream is None:
            yield
            return
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield


def _mark(stream: torch.cuda.Stream | None) -> Event:
    return None if stream is None else stream.record_event()
