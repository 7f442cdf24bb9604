"""Activations that wait in host memory from the forward of their layer to its backward (decision 43).

No bit changes: autograd gets the numbers back that it saved.

The unit is the storage. Of several tensors that look into one it is copied once, and a storage that lives anyway (of a
parameter, of the stage's input, of what all layers read) stays where it is. At most one layer's storages at a time are
on their way out; when the backward of a layer begins, those of the layer before it are fetched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ppctl.geometry.layers import SMALLEST_OFFLOADED
from ppctl.model.host_copies import Copies, Event, Moved
from ppctl.model.stage_model import Run


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
        """The calls of a stage's decoder, of which the first `number` leave what they save to the host.

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
        """`run`, of which what is saved goes to the host when it ends."""
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
        """`run`, the first one that moves nothing: after its forward all is out, and its backward fetches the layer
        before it."""

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
        """Begin to move; the layer before is out by then."""
        self._offload.release()
        self._alive.clear()
        self._out = self._offload.copies.out(self._moved.values())
        self._offload.leaving = self

    def gone(self) -> None:
        """Let go of what is out."""
        self._offload.copies.wait(self._out)
        for moved in self._moved.values():
            moved.device = None

    def fetch(self) -> None:
        """Begin to bring everything back, unless that has begun."""
        items, self._moved = list(self._moved.values()), {}
        if self._offload.leaving is self:  # nothing has left the device yet
            self._offload.leaving = None
            self._offload.copies.give_up(items, self._out)
        elif items:
            self._offload.release()
            self._back = self._offload.copies.back(items, self._out)

    def arrive(self) -> None:
        """Wait until everything is back, while the layer before, whose backward comes next, is fetched."""
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
