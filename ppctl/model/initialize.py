"""Initial weights: every parameter's values are a pure function of (seed, canonical name, model).

The same parameter starts equal in every cut, on every device and in every dtype (rounded from one float32 draw).
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.geometry.canonical_names import parameter_of
from ppctl.geometry.rows import Parts
from ppctl.host.processes import own_share
from ppctl.model.stage_model import pieces


def normal(seed: int, name: str, shape: tuple[int, ...], std: float) -> Tensor:
    """A float32 draw from normal(0, std) that depends on the arguments alone.

    The generator is Philox, keyed by the 128-bit BLAKE2b of `seed:name`. Torch's own CPU generator would use 32 bits of
    a seed (two of DeepSeek-V3's 47,000 parameters would collide in one run of four), and gives other numbers on CUDA
    and on other CPUs.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    values = generator.standard_normal(shape, dtype=np.float32)
    values *= np.float32(std)
    return torch.from_numpy(values)


def initial_value(name: str, model: ModelConfig, seed: int) -> Tensor:
    """The start value of the parameter `name` (float32, CPU), by its row in the table of parameters.

    All names of a tied parameter draw under the name of its owner, so that they start with equal values.
    """
    row = parameter_of(name, model)
    if row.start in ("ones", "zeros"):
        return torch.ones(row.shape, device="cpu") if row.start == "ones" else torch.zeros(row.shape, device="cpu")
    std = model.init_method_std
    if row.start == "residual":
        std /= math.sqrt(2 * model.num_layers)
    if row.start == "adapter":
        std = 1 / row.shape[0]
    return normal(seed, row.copy_of or name, row.shape, std)


_MOST_AHEAD = 2**32
"""The most bytes that a rank draws ahead: a job's own limit of memory may be far below the machine's."""


@torch.no_grad()
def initialize(parameters: Mapping[str, nn.Parameter], model: ModelConfig, seed: int, parts: Parts) -> None:
    """Fill a stage's parameters (canonical name -> parameter) with the parts of their initial values that it holds.

    Threads draw parameters ahead, in a sixteenth of the rank's memory: numpy draws without Python's lock, 30 million
    numbers a second on each core.
    """
    threads, memory = own_share()
    room, ahead = min(memory // 16, _MOST_AHEAD) // torch.float32.itemsize, deque[_Drawn]()
    pool = ThreadPoolExecutor(threads)
    try:
        for stack, parameter in parameters.items():
            row = parameter_of(stack, model)
            for name, tensor in pieces(stack, parameter, row, parts.experts(row.experts)):
                size = math.prod(parameter_of(name, model).shape)
                while ahead and (len(ahead) > threads or size + sum(each.size for each in ahead) > room):
                    ahead.popleft().fill()
                drawn = pool.submit(initial_value, name, model, seed)
                ahead.append(_Drawn(tensor, parts.slices(row), size, drawn))
        for each in ahead:
            each.fill()
    finally:
        pool.shutdown(cancel_futures=True)  # an error does not wait for draws that nobody has begun


class _Drawn(NamedTuple):
    """A parameter's part, and the draw of the whole parameter that a thread makes."""

    tensor: Tensor
    part: tuple[slice, ...]
    size: int
    values: Future[Tensor]

    def fill(self) -> None:
        self.tensor.copy_(self.values.result()[self.part])


Initialize = Callable[[Mapping[str, nn.Parameter], ModelConfig, int, Parts], None]
"""(parameters by canonical name, model, seed, parts held here): fills the parameters."""
