"""Rotary positions: the tables of a stage and how a head is turned.

Knows positions, frequencies and their extension to longer contexts. Must not know projections, layers or weights.

Sources: rotary embeddings, Su et al. 2021 (arXiv:2104.09864); YaRN, Peng et al. 2023 (arXiv:2309.00071), with
DeepSeek-V2's two factors on the logarithm of the extension (`mscale`, `mscale_all_dim`); Llama 3.1's extension as its
published code and config.json have it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import head_dim
from ppctl.tensors.wide_dtype import wide_dtype


def rotary_dim(model: ModelConfig) -> int:
    """How many dimensions of a head are turned: `rotary_percent` of it, or latent attention's share with positions."""
    if model.multi_latent_attention:
        return model.qk_pos_emb_head_dim
    return int(head_dim(model) * model.rotary_percent)


class Rotary:
    """Cosines and sines of every position, shared by the layers of a stage.

    Frequencies are `base ** (-2i / dim)` for i < dim / 2; dimension i turns with dimension i + dim / 2. The longest
    table asked for so far is kept, and shorter ones are its slices.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.dim = rotary_dim(model)
        self.model = model
        self._tables = torch.empty(2, 0, self.dim)

    def tables(self, like: Tensor, length: int, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and sines [length, dim] of the positions in a row, on the device of `like` and in its dtype.

        With other `positions` [b, s], each below `length`, they are [b, 1, s, dim]: a row's own, the same for every
        head.
        """
        kept = self._tables
        if kept.shape[1] < length or kept.device != like.device or kept.dtype != like.dtype:
            self._tables = self._compute(length, like)
        cos, sin = self._tables[:, :length] if positions is None else self._tables[:, positions, None].transpose(2, 3)
        return cos, sin

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
        angles = torch.outer(positions, frequencies).repeat(1, 2)
        return (torch.stack((angles.cos(), angles.sin())) * magnitude).to(like.dtype)


def _slowed(frequencies: Tensor, model: ModelConfig, dim: int) -> Tensor:
    """[dim / 2] frequencies, those that turn less than `beta_slow` times in the original length divided by the factor,
    those that turn more than `beta_fast` times kept, and a ramp between.
    """
    ramp = _ramp_of_turns if model.rotary_scaling_type == "llama3" else _ramp_of_indices
    slow = ramp(frequencies, model, dim).clamp(0, 1)
    return frequencies * (1 - slow) + frequencies / (model.rotary_scaling_factor or 1.0) * slow


def _ramp_of_turns(frequencies: Tensor, model: ModelConfig, _: int) -> Tensor:
    """Llama 3.1: linear in the turns within the original length."""
    turns = model.original_max_position_embeddings * frequencies / (2 * math.pi)
    return (model.beta_fast - turns) / (model.beta_fast - model.beta_slow)


def _ramp_of_indices(frequencies: Tensor, model: ModelConfig, dim: int) -> Tensor:
    """YaRN: linear in the index of the frequency, between whole indices."""

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


def join_heads(first: Tensor, rest: Tensor) -> Tensor:
    """Parts of heads [b, heads, s, dim] put together, a token's heads side by side in memory.

    Attention's result has the layout of its queries: in this one the projection behind it reads it without a copy.
    """
    return torch.cat((first.transpose(1, 2), rest.transpose(1, 2)), dim=-1).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, *, interleaved: bool = False) -> Tensor:
    """Turn the first dimensions of every head [b, heads, s, dim] by its position's angles [(b, 1,) s, turned <= dim].

    `interleaved` heads store the two halves of a pair as neighbours (DeepSeek); the result has them apart, as in
    Llama. The product of queries and keys is the same, because both are reordered. Without tables heads stay as they
    are: the model has learned positions.
    """
    if cos is None or sin is None:
        return x
    turned = cos.shape[-1]
    if turned < x.shape[-1]:
        first, rest = x[..., :turned], x[..., turned:]
        return join_heads(rotate(first, cos, sin, interleaved=interleaved), rest)
    if interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin
