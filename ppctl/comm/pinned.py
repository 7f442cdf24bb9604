"""CUDA tensors over a backend that moves host memory only: every message goes through pinned buffers.

Slower than NCCL by two copies, and a send waits for the device. In return several ranks can share one GPU, which NCCL
allows only in its newest versions. Must not know schedules or stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ppctl.comm.buffers import Message
from ppctl.comm.channels import DirectEnd, Pending


class PinnedEnd(DirectEnd):
    """A channel's end for CUDA tensors on a host backend.

    Pinned buffers come from torch's own pool, which reuses one only after its copies are done.
    """

    __slots__ = ()

    def start_send(self, message: Message) -> Sequence[Pending]:
        """Copy to the host, wait for the copies, start sending them."""
        copies = tuple(_pinned(tensor).copy_(tensor, non_blocking=True) for tensor in message)
        torch.cuda.current_stream().synchronize()
        return super().start_send(copies)

    def receive_into(self, message: Iterable[torch.Tensor]) -> Sequence[Pending]:
        """Start receiving on the host; what waits for it starts the copy to the device."""
        targets = list(message)
        copies = [_pinned(tensor) for tensor in targets]
        works = super().receive_into(copies)
        return [_Upload(*parts) for parts in zip(works, copies, targets, strict=True)]


class _Upload:
    """A receive on the host that ends on the device."""

    __slots__ = ("_copy", "_target", "_work")

    def __init__(self, work: Pending, copy: torch.Tensor, target: torch.Tensor) -> None:
        self._work = work
        self._copy = copy
        self._target = target

    def wait(self) -> None:
        """Wait for the host's copy, then queue the device's on the current stream."""
        self._work.wait()
        self._target.copy_(self._copy, non_blocking=True)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
