"""Activations that wait in host memory from the forward of their layer to its backward (decision 43).

No bit changes: autograd gets the numbers back that it saved.

The unit is the storage. One that several tensors share is copied once; one that lives anyway (of a parameter, of the
stage's input, of what all layers read) stays where it is. At most one layer's storages at a time are on their way out;
when the backward of a layer begins, the storages of the layer before it are fetched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ppctl.geometry.layers import SMALLEST_OFFLOADED
from ppctl.model.stage_model import Run

Event = torch.cuda.Event | None
"""A moment in the work of a GPU; None on the CPU, where everything is done immediately."""


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

    They come in eight sizes for each power of two, because the number of rows an expert gets differs between steps.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: dict[int, deque[_Free]] = {}
        self.bytes = 0
        """Bytes of all buffers that were made."""

    def take(self, size: int) -> _Free:
        """The buffer of at least `size` bytes given back first, or a new one. It is free once `read` has passed."""
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
        """Make buffers, so that there are `times` as many; all must be given back. Pinning may wait for the device."""
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
        """Start copying to the host, behind what is enqueued. `wait` for the event before freeing device memory."""
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
        """Start copying `items` back to the device, after the event `out` of their copy to the host. Pass the returned
        event to `wait` before reading them.

        The device memory is allocated on the compute stream, which waits for this copy before it reads the memory; so
        it cannot be reused while the copy runs.
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
        """Let what is computed from now on wait for the event of an `out` or a `back`."""
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


class Offload:
    """Moves to the host, and back, the tensors that a rank's layers save for their backward."""

    def __init__(self, device: torch.device) -> None:
        self.copies = Copies(device)
        self.leaving: LayerStorages | None = None
        """The layer whose storages are on their way out, and still on the device."""

    def release(self) -> None:
        """Free the device memory of what is on its way to the host, once it has arrived; what is computed next waits
        for that."""
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            leaving.gone()

    def stage(self, runs: Sequence[tuple[Run, Sequence[nn.Module]]], number: int) -> list[Run]:
        """The calls of a stage's decoder, of which the first `number` move what they save to the host.

        `runs` are the calls in order, each with the layers that it runs.
        """
        stage = _Stage(self)
        called = [stage.moving(run, layers, first=not place) for place, (run, layers) in enumerate(runs[:number])]
        behind = [run for run, _ in runs[number:]]
        if called and behind:
            behind[0] = stage.fetching(behind[0])
        return [*called, *behind]


class _Stage:
    def __init__(self, offload: Offload) -> None:
        self.offload = offload
        self._last: LayerStorages | None = None

    def moving(self, run: Run, layers: Sequence[nn.Module], *, first: bool) -> Run:
        """`run`, whose saved tensors go to the host when it has ended."""
        kept = [tensor for layer in layers for tensor in (*layer.parameters(), *layer.buffers())]

        def call(x: Tensor, *places: Any) -> Tensor:
            """Run the layer, and move what it saves to the host afterwards, unless someone else still needs the
            storage."""
            if not torch.is_grad_enabled():
                return run(x, *places)
            alive = {_storage(tensor) for tensor in (*kept, *_tensors(places))}
            if first and x.is_leaf:  # the stage's input: its message lives until the backward has ended
                alive.add(_storage(x))
            storages = LayerStorages(self.offload, None if first else self._last, alive)
            with saved_tensors_hooks(storages.pack, unpack):
                out = run(x, *places)
            storages.leave()
            self._last = storages
            return out

        return call

    def fetching(self, run: Run) -> Run:
        """`run`, the first one that moves nothing: after its forward the layer before is out, and its backward fetches
        that layer."""

        def call(x: Tensor, *places: Any) -> Tensor:
            out = run(x, *places)
            if torch.is_grad_enabled():
                self.offload.release()
                storages, self._last = self._last, None
                assert storages is not None  # a stage's runs are called in order
                out.register_hook(lambda _: storages.fetch())
            return out

        return call


class LayerStorages:
    """The storages that one layer saved in one forward, on their way to the host and back."""

    def __init__(self, offload: Offload, before: LayerStorages | None, alive: set[int]) -> None:
        self._offload, self._before = offload, before
        self._alive = alive
        self._moved: dict[tuple[int, int], Moved] = {}
        """(storage, version) -> the copy on the host, until it is fetched; then only the users of the tensor hold
        it."""
        self._out: Event = None
        self._back: Event = None
        self._arrived = False

    @property
    def size(self) -> int:
        """Bytes that are moved."""
        return sum(moved.size for moved in self._moved.values())

    def pack(self, tensor: Tensor) -> Tensor | _Packed:
        """Returns what autograd is to save in place of `tensor`."""
        storage = _storage(tensor)
        if storage in self._alive or tensor.untyped_storage().nbytes() < SMALLEST_OFFLOADED:
            return tensor
        # Until the layer's forward ends its storages are held: no other storage can take their addresses.
        key = storage, tensor._version
        if key not in self._moved:
            self._moved[key] = Moved(tensor)
        place = tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return _Packed(self, self._moved[key], tensor.dtype, *place)

    def leave(self) -> None:
        """Begin to copy to the host; first free the device memory of the layer before."""
        self._offload.release()
        self._alive.clear()
        self._out = self._offload.copies.out(self._moved.values())
        self._offload.leaving = self

    def gone(self) -> None:
        """Free the device memory of what was copied out; what is computed next waits for the copies."""
        self._offload.copies.wait(self._out)
        for moved in self._moved.values():
            moved.device = None

    def fetch(self) -> None:
        """Begin to bring everything back, unless that has begun; what has not left the device stays there."""
        items, self._moved = list(self._moved.values()), {}
        if self._offload.leaving is self:  # nothing has left the device yet
            self._offload.leaving = None
            self._offload.copies.give_up(items, self._out)
        elif items:
            self._offload.release()
            self._back = self._offload.copies.back(items, self._out)

    def arrive(self) -> None:
        """Fetch everything, begin to fetch the layer before, whose backward comes next, and wait for the former."""
        if self._arrived:
            return
        self._arrived = True
        self.fetch()
        if self._before is not None:
            self._before.fetch()
            self._before = None
        self._offload.copies.wait(self._back)


class _Packed(NamedTuple):
    layer: LayerStorages
    storage: Moved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


def unpack(packed: Tensor | _Packed) -> Tensor:
    """Returns the tensor that was saved as `packed`, when it is back on the device."""
    if isinstance(packed, Tensor):
        return packed
    packed.layer.arrive()
    storage = packed.storage.device
    assert storage is not None
    return storage.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among a layer's arguments or results, which may be tuples of tuples."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple):
        for value in values:
            yield from _tensors(value)
