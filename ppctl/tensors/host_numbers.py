"""Numbers that the host reads off its device: any number of tensors in one copy, for which it waits once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostNumbers:
    """The values of tensors, copied to the host from now on; reading does not wait for work enqueued later."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """`tensors` lie on one device, and have floating point numbers, which float64 holds exactly."""
        self._sizes = [tensor.numel() for tensor in tensors]
        flat = torch.cat([tensor.detach().reshape(-1).to(torch.float64) for tensor in tensors])
        self._arrived: torch.cuda.Event | None = None
        if flat.device.type == "cuda":
            self._arrived = torch.cuda.Event(blocking=True)
            flat = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True).copy_(
                flat, non_blocking=True
            )
            self._arrived.record()
        self._flat = flat

    def read(self) -> list[list[float]]:
        """The numbers of each tensor, flat; waits for the device."""
        if self._arrived is not None:
            self._arrived.synchronize()
        numbers = iter(self._flat.tolist())
        return [[next(numbers) for _ in range(size)] for size in self._sizes]
