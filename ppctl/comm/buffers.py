"""The form of a message, and the pool of buffers that messages are received into.

New receive buffers slow pipelines down on a CPU (page faults) and fragment memory on a GPU. So a returned buffer is
used again, unless something else still refers to its memory (a view that became a gradient, for example).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

Message = tuple[torch.Tensor, ...]

_MOST_HELD = 4
"""The most returned buffers of one spec that are kept although something else still refers to them."""


class TensorLike(Protocol):
    """Anything with a shape and a dtype: a plan's TensorSpec (dtype by name), or a tensor."""

    @property
    def shape(self) -> Sequence[int]:
        """Sizes."""

    @property
    def dtype(self) -> str | torch.dtype:
        """A dtype or its name."""


class MessageSpec(tuple[tuple[torch.Size | None, torch.dtype], ...]):
    """The tensors of one edge's message: a tuple of (shape, dtype). A shape of None may differ between messages."""

    __slots__ = ()

    @classmethod
    def of(cls, tensors: Iterable[TensorLike], *, variable: bool = False) -> MessageSpec:
        """The spec of tensors or plan specs; `variable` leaves shapes open. Raises ValueError for other than floats."""
        return cls((None if variable else torch.Size(t.shape), _dtype(t.dtype)) for t in tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of a message, if the shapes are known."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in self if shape is not None)

    def fits(self, message: Message) -> bool:
        """Whether the message has the spec's count, shapes and dtypes."""
        if len(message) != len(self):
            return False
        pairs = zip(message, self, strict=True)
        return all(t.dtype == dtype and (shape is None or t.shape == shape) for t, (shape, dtype) in pairs)

    @torch.inference_mode(False)  # else buffers of an evaluation could take no part in a later step
    def make(self, device: torch.device, shapes: Sequence[Sequence[int]] | None = None) -> Message:
        """New uninitialised tensors; `shapes` gives their shapes if the spec leaves them open."""
        sizes = [shape for shape, _ in self] if shapes is None else shapes
        pairs = zip(sizes, self, strict=True)
        return tuple(torch.empty(size or (), dtype=dtype, device=device) for size, (_, dtype) in pairs)

    def __str__(self) -> str:
        texts = (f"{str(dtype).removeprefix('torch.')}{_sizes(shape)}" for shape, dtype in self)
        return ", ".join(texts) or "nothing"


def _sizes(shape: torch.Size | None) -> str:
    return "[of any shape]" if shape is None else str(list(shape))


def _dtype(dtype: str | torch.dtype) -> torch.dtype:
    named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(named, torch.dtype) or not named.is_floating_point:
        raise ValueError(f"a message between stages holds floating point tensors; {dtype!r} is not such a dtype")
    return named


class Shelf:
    """The free buffers of one message spec."""

    __slots__ = ("_device", "_free", "_held", "_unshared", "spec")

    def __init__(self, spec: MessageSpec, device: torch.device) -> None:
        self.spec = spec
        self._device = device
        self._free: list[Message] = []
        self._held: deque[Message] = deque(maxlen=_MOST_HELD)
        self._unshared = 0

    def take(self) -> Message:
        """Buffers for a message, off the shelf or new; their contents are undefined."""
        if self._free:
            return self._free.pop()
        for index, message in enumerate(self._held):
            if self._is_unshared(message):
                del self._held[index]
                return message
        message = self.spec.make(self._device)
        self._unshared = _owners(message[0]) if message else 0
        return message

    def give_back(self, message: Message) -> None:
        """Return buffers for reuse: immediately, or once nothing else refers to their storage. A model often keeps its
        input until it gets the next one.
        """
        (self._free if self._is_unshared(message) else self._held).append(message)

    def _is_unshared(self, message: Message) -> bool:
        return all(_owners(t) == self._unshared for t in message)


def _owners(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


class BufferPool:
    """Shelves by spec, shared by all channels of a communicator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._shelves: dict[MessageSpec, Shelf] = {}

    def shelf(self, spec: MessageSpec) -> Shelf:
        """The shelf of one spec, shared by all edges with equal specs."""
        if spec not in self._shelves:
            self._shelves[spec] = Shelf(spec, self._device)
        return self._shelves[spec]
