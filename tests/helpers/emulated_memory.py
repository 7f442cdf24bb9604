"""A device's memory as torch's caching allocator hands it out: what the host has freed is used again at once.

Knows blocks, and when one is free. Must not know what is computed.

The host frees a tensor while the device has yet to compute on it: that is right as long as whoever gets the memory next
stands behind it in the same stream. What another stream uses (`record`) is free only when the host, at an allocation,
finds that the device has passed what that stream held when the tensor was freed: recordStream. Memory is real here: a
block that is handed out too early has wrong bits. Blocks are counted as if they could be split and joined at will: the
driver is asked where all of them together are more than ever before.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy
import torch

ROUNDING = 64
"""Bytes of which every block is a multiple."""


@contextmanager
def beneath() -> Iterator[None]:
    """Plain tensors: no mode sees what happens inside, and no graph is built."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowADInplaceOrView(),
    ):
        yield


@dataclass(eq=False)
class Block:
    """A piece of the device's memory."""

    bytes: numpy.ndarray
    streams: set[int] = field(default_factory=set)
    """Streams other than the current one that use it."""

    def __post_init__(self) -> None:
        with beneath():
            self.storage = torch.from_numpy(self.bytes).untyped_storage()
        """The memory as the device sees it: it does not keep the block from being freed."""


class Memory:
    """One device's blocks. `mark(stream)` puts a mark behind what a stream holds; its `passed` becomes true.

    `ask` is called whenever the driver is asked for memory.
    """

    def __init__(
        self, mark: Callable[[int], SimpleNamespace], ask: Callable[[], object], *, records: bool = True
    ) -> None:
        self.mark, self.ask, self.records = mark, ask, records
        self.in_use = self.mapped = 0
        """Bytes of blocks that are not free, and that the driver has given."""
        self.free: dict[int, list[Block]] = defaultdict(list)
        self.held: list[tuple[Block, list[SimpleNamespace]]] = []
        """Freed by the host, and not yet seen to be through with other streams."""
        self.used: dict[int, Block] = {}
        """By address: blocks that some tensor of the host's is in."""
        self.reserved = 0
        """Bytes that were taken from the device, ever."""
        self.most_held = 0
        """Blocks that the host had freed and could not use again, at most."""

    def empty(self, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor for the host, whose memory is free when the host has no tensor in it any more."""
        self._look()
        items = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if 0 not in size else 0
        block = self._take(-(-max(items * dtype.itemsize, 1) // ROUNDING) * ROUNDING)
        self.in_use += block.bytes.nbytes
        if self.in_use > self.mapped:
            self.mapped = self.in_use
            self.ask()
        owner = block.bytes.view()
        weakref.finalize(owner, self._freed, block)
        self.used[block.storage.data_ptr()] = block
        with beneath():
            return torch.empty(0, dtype=dtype).set_(torch.from_numpy(owner).untyped_storage(), 0, size, stride)

    def seen_by_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor as an entry of a queue knows it: it keeps no memory from being freed."""
        with beneath():
            block = self.used.get(tensor.untyped_storage().data_ptr())
            storage = tensor.untyped_storage() if block is None else block.storage  # else the host's own
            alias = torch.empty(0, dtype=tensor.dtype)
            return alias.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())

    def record(self, tensor: torch.Tensor, stream: int) -> None:
        """Note that `stream` uses the tensor, as recordStream does."""
        block = self.used.get(tensor.untyped_storage().data_ptr())
        if block is not None and self.records:
            block.streams.add(stream)

    def _take(self, size: int) -> Block:
        if self.free[size]:
            return self.free[size].pop()
        self.reserved += size
        return Block(numpy.zeros(size, dtype=numpy.uint8))

    def _freed(self, block: Block) -> None:
        del self.used[block.storage.data_ptr()]
        tickets = [self.mark(stream) for stream in block.streams]
        block.streams = set()
        if tickets:
            self.held.append((block, tickets))
            self.most_held = max(self.most_held, len(self.held))
        else:
            self._give_back(block)

    def _give_back(self, block: Block) -> None:
        self.in_use -= block.bytes.nbytes
        self.free[block.bytes.nbytes].append(block)

    def _look(self) -> None:
        """Find what other streams are through with."""
        held, self.held = self.held, []
        for block, tickets in held:
            if all(ticket.passed for ticket in tickets):
                self._give_back(block)
            else:
                self.held.append((block, tickets))
