"""Rotary positions: the tables of a stage and how a head is turned.

Sources: rotary embeddings, Su et al. 2021 (arXiv:2104.09864); YaRN, Peng et al. 2023 (arXiv:2309.00071), with
DeepSeek-V2's two factors on the logarithm of the extension (`mscale`, `mscale_all_dim`); Llama 3.1's extension as its
published code and config.json have it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ppctl.config.schema import ModelConfig
from ppctl.tensors.wide_dtype import wide_dtype


def rotary_dim(model: ModelConfig) -> int:
    """How many dimensions of a head are turned: `rotary_percent` of it, or latent attention's share with positions."""
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim
    return int(model.head_dim * model.rotary_percent)


class Rotary:
    """Cosines and sines of every position, shared by the layers of a stage.

    Frequencies are `base ** (-2i / dim)` for i < dim / 2; dimension i turns with dimension i + dim / 2. The longest
    table so far is cached, and shorter tables are its slices.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.dim = rotary_dim(model)
        self.model = model
        self._turns = torch.empty(0, 2, self.dim // 2, device="cpu")

    def turns(self, like: Tensor, length: int, positions: Tensor | None = None) -> Tensor:
        """Cosines and sines [length, 2, dim / 2] of the positions below `length`, with the device and dtype of `like`.

        With `positions` [b, s], each below `length`, they are [b, 1, s, 2, dim / 2]: a table for each sample, for all
        its heads.
        """
        kept = self._turns
        if len(kept) < length or kept.device != like.device or kept.dtype != like.dtype:
            self._turns = self._compute(length, like)
        return self._turns[:length] if positions is None else self._turns[positions, None].transpose(1, 2)

    # A table first made during generation must serve training too: not an inference tensor.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self, length: int, like: Tensor) -> Tensor:
        wide = wide_dtype(like.dtype)
        exponents = torch.arange(0, self.dim, 2, dtype=wide, device=like.device) / self.dim
        frequencies, magnitude = self.model.rotary_base**-exponents, 1.0
        if self.model.rotary_scaling_factor is not None:
            frequencies = _slowed(frequencies, self.model, self.dim)
            magnitude = yarn_magnitude(self.model, self.model.mscale) / yarn_magnitude(
                self.model, self.model.mscale_all_dim
            )
        positions = torch.arange(length, dtype=wide, device=like.device)
        angles = torch.outer(positions, frequencies)
        return (torch.stack((angles.cos(), angles.sin()), dim=1) * magnitude).to(like.dtype)


def _slowed(frequencies: Tensor, model: ModelConfig, dim: int) -> Tensor:
    """The frequencies [dim / 2] for the extended length. In the original length, those that turn less than `beta_slow`
    times are divided by the factor, those that turn more than `beta_fast` times are kept, with a ramp in between.
    """
    ramp = _ramp_of_turns if model.rotary_scaling_type == "llama3" else _ramp_of_indices
    slow = ramp(frequencies, model, dim).clamp(0, 1)
    return frequencies * (1 - slow) + frequencies / (model.rotary_scaling_factor or 1.0) * slow


def _ramp_of_turns(frequencies: Tensor, model: ModelConfig, _: int) -> Tensor:
    """How far each frequency is slowed: 0 or less not, 1 or more fully. Llama 3.1: linear in the turns it makes."""
    turns = model.original_max_position_embeddings * frequencies / (2 * math.pi)
    return (model.beta_fast - turns) / (model.beta_fast - model.beta_slow)


def _ramp_of_indices(frequencies: Tensor, model: ModelConfig, dim: int) -> Tensor:
    """As `_ramp_of_turns`, for YaRN: linear in the index of the frequency, between whole indices."""

    def index_of(turns: float) -> float:
        length = model.original_max_position_embeddings
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(model.rotary_base))

    first = max(math.floor(index_of(model.beta_fast)), 0)
    last = min(math.ceil(index_of(model.beta_slow)), dim - 1)
    indices = torch.arange(dim // 2, dtype=frequencies.dtype, device=frequencies.device)
    return (indices - first) / (last - first or 0.001)


def yarn_magnitude(model: ModelConfig, mscale: float) -> float:
    """YaRN's correction of the attention's temperature, 0.1 x `mscale` x ln(factor) + 1; 1 without YaRN."""
    factor = model.rotary_scaling_factor or 1.0
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 and model.rotary_scaling_type == "yarn" else 1.0


def rotate(x: Tensor, turns: Tensor | None, *, first: int = 0, interleaved: bool = False) -> Tensor:
    """Turn dimensions of every head [b, heads, s, dim], from `first` on, by its position's angles.

    `turns` [(b, 1,) s, 2, half] has cosines and sines for 2 x half dimensions; the others stay as they are.
    `interleaved` heads store the two halves of a pair as neighbours (DeepSeek); the result has them apart, as in
    Llama. The product of queries and keys is the same, because both are reordered. Without `turns` heads stay as they
    are: the model has learned positions. In the result a token's heads lie side by side: attention's result has the
    layout of its queries, and so the projection after it reads that result without a copy.
    """
    if turns is None:
        return x
    if torch.compiler.is_compiling():
        return _step_by_step(x, turns, first, interleaved)
    turned: Tensor = _Rotate.apply(x, turns, first, interleaved, None)  # type: ignore[no-untyped-call]  # torch's own
    return turned


def rotate_heads(
    x: Tensor, heads: int, turns: Tensor, *, first: int = 0, interleaved: bool = False, own: bool = False
) -> Tensor:
    """`rotate` of a projection's result x [b, s, heads x dim], by head [b, heads, s, dim].

    If nobody but the caller reads x (`own`), the result overwrites x, and the gradient of x overwrites the result's
    gradient, which attention makes for it alone; not if x is a view, of which autograd would copy both.
    """
    # First what a compiler traces without a break: it cannot ask whether x is a view.
    if not own or torch.compiler.is_compiling() or x._is_view() or not x.is_contiguous():
        return rotate(_by_head(x, heads), turns, first=first, interleaved=interleaved)
    turned: Tensor = _Rotate.apply(x, turns, first, interleaved, heads)  # type: ignore[no-untyped-call]  # torch's own
    return _by_head(turned, heads)


def _by_head(x: Tensor, heads: int) -> Tensor:
    by_head: Tensor = x.unflatten(-1, (heads, -1)).transpose(1, 2)
    return by_head


class _Rotate(torch.autograd.Function):
    """x cos + (-high, low) sin, where each product and the sum is rounded, and the reverse for the gradient. With
    `heads` x is [b, s, heads x dim], and is overwritten."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turns: Tensor, first: int, interleaved: bool, heads: int | None) -> Tensor:
        ctx.save_for_backward(turns)
        ctx.how = first, interleaved, heads
        if heads is not None:
            ctx.mark_dirty(x)
        return _turned(x, turns, first, interleaved, heads, back=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        turned = _turned(gradients[0], *ctx.saved_tensors, *ctx.how, back=True)
        return turned, None, None, None, None


def _turned(x: Tensor, turns: Tensor, first: int, interleaved: bool, heads: int | None, *, back: bool) -> Tensor:
    """Turned heads, or their gradient, in three steps over the turned dimensions: all products of a pair, then both
    sums, in place. With `heads` the result is x, overwritten, if it is contiguous."""
    stop, of_low, of_high = first + 2 * turns.shape[-1], *((torch.add, torch.sub) if back else (torch.sub, torch.add))
    if heads is None:
        b, count, s, dim = x.shape
        result = out = x.new_empty(b, s, count, dim).transpose(1, 2)
        for begin, end in ((0, first), (stop, dim)):
            if begin < end:
                out[..., begin:end].copy_(x[..., begin:end])
    else:
        result = x.contiguous()
        x = out = _by_head(result, heads)
    # [b, heads, s, cos sin, low high, half]
    products = _pairs(x[..., first:stop], interleaved and not back).unsqueeze(-3) * turns.unsqueeze(-2)
    (low_cos, high_cos), (low_sin, high_sin) = (each.unbind(-2) for each in products.unbind(-3))
    low, high = _pairs(out[..., first:stop], interleaved and back).unbind(-2)
    of_low(low_cos, high_sin, out=low)
    of_high(high_cos, low_sin, out=high)
    return result


def _step_by_step(x: Tensor, turns: Tensor, first: int, interleaved: bool) -> Tensor:
    """Turn pairs in a form for a compiler, which fuses the steps itself and cannot write into parts of a tensor."""
    stop = first + 2 * turns.shape[-1]
    (low, high), (cos, sin) = _pairs(x[..., first:stop], interleaved).unbind(-2), turns.unbind(-2)
    parts = (x[..., :first], low * cos - high * sin, high * cos + low * sin, x[..., stop:])
    return torch.cat([part.transpose(1, 2) for part in parts], dim=-1).transpose(1, 2)


def _pairs(heads: Tensor, interleaved: bool) -> Any:
    """Heads [..., 2 x half] as a view [..., 2, half] of the low and high halves of pairs."""
    return heads.unflatten(-1, (-1, 2)).transpose(-1, -2) if interleaved else heads.unflatten(-1, (2, -1))
