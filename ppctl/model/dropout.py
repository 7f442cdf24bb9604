"""Dropout whose draws are a pure function of (seed, step, sample, module's name, global position): decision 40.

No generator has a state: no cut, resume, recomputation or split over ranks changes a draw. The mask is not saved for
the backward, which draws it again.

A draw has three levels: a key of a sample (host, once a step), a key of a row of elements (64 bits, on the device: a
position of the hidden state, or a query of a head), and 32 bits for each element of the row. Sources: splitmix64 for
rows (Steele et al. 2014); for elements the two-multiply hash of Wellons ("prospector", lowbias32) with the row's
second word added between the multiplications.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ppctl.geometry import layers


class Draws(NamedTuple):
    """The samples and positions on which all draws of one microbatch depend."""

    samples: Tensor
    """[b] int64, on the device: the key of each row of the microbatch (`sample_key`)."""
    positions: Tensor | None = None
    """[s] int64: the global positions of a hidden state's tokens; None means 0 to s - 1."""


class RowKeys(NamedTuple):
    """Two 32-bit words for each row of elements: int32 tensors of one shape."""

    first: Tensor
    second: Tensor


def sample_key(seed: int, step: int, sample: int) -> int:
    """The key of a sample: `step` counts completed steps, `sample` is its place in the global batch."""
    return _hash(f"{seed}:{step}:{sample}")


def name_key(name: str) -> int:
    """The key of a module, computed from its canonical name."""
    return _hash(name)


def row_keys(keys: Tensor, rows: Tensor) -> RowKeys:
    """The words of each row, from `keys` (int64) and row numbers (int64), which broadcast."""
    mixed = _mix(keys + rows * _GOLDEN)
    return RowKeys((mixed << 32 >> 32).to(torch.int32), (mixed >> 32).to(torch.int32))


def draw(rows: RowKeys, columns: Tensor) -> Tensor:
    """Uniform 32-bit numbers as int32 [*rows, c], from keys of rows of any shape and column numbers [c] (int32).

    Within a row different column numbers give different results. Products keep their lowest 32 bits, as torch's int32.
    """
    x = columns ^ rows.first[..., None]
    x ^= _shifted(x, 16)
    x *= _signed(0x7FEB352D, 32)
    x += rows.second[..., None]
    x ^= _shifted(x, 15)
    x *= _signed(0x846CA68B, 32)
    x ^= _shifted(x, 16)
    return x


def kept(rows: RowKeys, columns: Tensor, p: float) -> Tensor:
    """Which elements are not dropped, bool [*rows, c]: each is dropped with probability `p`, rounded to 32 bits."""
    return draw(rows, columns) >= min(round(p * 2**32), 2**32 - 1) - 2**31


class Dropout(nn.Module):
    """Drops elements of a hidden state, or of probabilities: 0 with probability p, else 1 / (1 - p) times as large.

    `key` is computed from the module's canonical name; the stage that owns the module sets it, on its device.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        # Not a buffer: buffers go into checkpoints. Not a number: a compiler would compile every layer anew.
        self.key = torch.zeros((), dtype=torch.int64, device="cpu")

    def keys(self, draws: Draws) -> Tensor:
        """[b] int64: the key of each sample for this module."""
        return _mix(draws.samples ^ self.key)

    def forward(self, x: Tensor, draws: Draws | None) -> Tensor:
        """`x` [b, s, h] with elements dropped; without `draws` x as it is."""
        if draws is None or not self.p:
            return x
        positions = draws.positions
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)
        keys = self.keys(draws)
        out: Tensor = _Dropout.apply(x, keys, positions, self.p)  # type: ignore[no-untyped-call]  # torch's own
        return out


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, positions: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keys, positions)
        ctx.p = p
        return _dropped(x, keys, positions, p)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        keys, positions = ctx.saved_tensors
        return _dropped(gradients[0], keys, positions, ctx.p), None, None, None


def _dropped(x: Tensor, keys: Tensor, positions: Tensor, p: float) -> Tensor:
    rows = row_keys(keys[:, None], positions)
    columns = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    number = max(1, (layers.DRAWN_ON_CPU if x.device.type == "cpu" else layers.DRAWN) // x.shape[-1])
    flat: Sequence[Tensor] = (x.flatten(0, 1), out.flatten(0, 1), rows.first.flatten(), rows.second.flatten())
    for part, into, *words in zip(*(tensor.split(number) for tensor in flat), strict=True):
        torch.mul(part, kept(RowKeys(*words), columns, p), out=into)
    return out.mul_(1 / (1 - p))


_GOLDEN = 0x9E3779B97F4A7C15 - 2**64


def _mix(words: Tensor) -> Tensor:
    """Splitmix64's finaliser of int64, whose products keep their lowest 64 bits."""
    words = (words ^ _shifted(words, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
    words = (words ^ _shifted(words, 27)) * _signed(0x94D049BB133111EB, 64)
    return words ^ _shifted(words, 31)


def _shifted(words: Tensor, count: int) -> Tensor:
    """Shifted right, with zeros from the left: torch's own shift of signed integers repeats the sign."""
    return (words >> count).bitwise_and_(2 ** (8 * words.itemsize - count) - 1)


def _signed(number: int, bits: int) -> int:
    """The signed integer with the same bits."""
    return number - 2**bits if number >> (bits - 1) else number


def _hash(text: str) -> int:
    """A hash of `text`, equal on all machines: 64 bits, signed."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
