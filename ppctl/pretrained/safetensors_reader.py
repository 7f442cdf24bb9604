"""Canonical tensors out of a Hugging Face directory.

Knows safetensors and DeepSeek's 8-bit blocks. Must not know modules, stages or ranks: whoever needs a tensor names it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from ppctl.errors import CheckpointError, Problem
from ppctl.families.directory import SCALE, ModelDirectory

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.bfloat16,
}
"""The dtype that each stored one is read as: 8-bit matrices are multiplied by their blocks' scales."""


class Reader:
    """Reads tensors by canonical name; files are mapped, not loaded."""

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}

    def spec(self, name: str) -> Tensor:
        """Shape and dtype that `tensor` will give, on the meta device."""
        stored = self.directory.stored[self.directory.names[name]]
        return torch.empty(stored.shape, dtype=DTYPES[stored.dtype], device="meta")

    def tensor(self, name: str) -> Tensor:
        """One canonical tensor, on the CPU."""
        return self.stored(self.directory.names[name])

    def stored(self, name: str) -> Tensor:
        """One tensor by its stored name."""
        tensor = self._get(name)
        if self.directory.stored[name].dtype == "F8_E4M3":
            return dequantised(tensor, self._get(name + SCALE), self.directory.block)
        return tensor

    def check_copies(self) -> None:
        """Compare the stored copies of tables with their originals: training keeps one of them.

        Raises CheckpointError (PP-E524) naming those that differ.
        """
        found = self.directory
        unequal = [name for name, of in found.copies.items() if not torch.equal(self.stored(name), self.tensor(of))]
        if unequal:
            message = f"{found.path} holds copies of the embedding or the output that differ from them"
            remedy = "leave multi-token prediction out: --no-mtp, or model.mtp_num_layers=null"
            raise CheckpointError(Problem("PP-E524", message, remedy, "\n".join(unequal)))

    def _get(self, name: str) -> Tensor:
        file = self.directory.stored[name].file
        if file not in self._files:
            self._files[file] = safe_open(file, framework="pt")
        tensor: Tensor = self._files[file].get_tensor(name)
        return tensor


def dequantised(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """bfloat16 [r, c] of a matrix in 8-bit floats and one float32 scale per block [ceil(r / R), ceil(c / C)]."""
    rows, columns = weight.shape
    factors = scale.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * factors).bfloat16()
