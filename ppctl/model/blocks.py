"""The blocks that decoder families share: rotary positions, grouped-query attention, SwiGLU, one decoder layer.

Knows ModelConfig's sizes and tensors of shape [b, s, h] (microbatch, sequence, hidden). Must not know stages, ranks,
weights' values or schedules. Attribute names are the canonical parameter names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ppctl.config.schema import ModelConfig


def head_dim(model: ModelConfig) -> int:
    """Width of one attention head: `kv_channels`, or hidden_size / num_attention_heads."""
    return model.kv_channels or model.hidden_size // model.num_attention_heads


class Rotary:
    """Tables of rotary position embeddings (Su et al. 2021, arXiv:2104.09864), shared by the layers of a stage.

    Frequencies are `base ** (-2i / dim)` for i < dim / 2; dimension i turns with dimension i + dim / 2 (GPT-NeoX's
    pairing, as Hugging Face stores Llama). The longest table asked for so far is kept, and shorter ones are its slices.
    """

    def __init__(self, dim: int, base: float) -> None:
        self.dim = dim
        self.base = base
        self._tables = torch.empty(2, 0, dim)

    def tables(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [s, dim] for the positions of `like` [b, s, ...], on its device and in its dtype."""
        length = like.shape[1]
        kept = self._tables
        if kept.shape[1] < length or kept.device != like.device or kept.dtype != like.dtype:
            self._tables = self._compute(length, like)
        return self._tables[0, :length], self._tables[1, :length]

    # A table first made during generation must serve training too: not an inference tensor.
    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self, length: int, like: Tensor) -> Tensor:
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float32, device=like.device) / self.dim
        positions = torch.arange(length, dtype=torch.float32, device=like.device)
        angles = torch.outer(positions, self.base**-exponents).repeat(1, 2)
        return torch.stack((angles.cos(), angles.sin())).to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn every head [b, heads, s, dim] by its position's angles [s, dim]."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention [b, s, h] -> [b, s, h]; `num_attention_heads` queries share `num_query_groups` keys.

    With `qk_layernorm`, queries and keys are RMS-normalised per head before they are turned (as Qwen3 does).
    """

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        dim = self.head_dim = head_dim(model)
        queries = model.num_attention_heads * dim
        keys = (model.num_query_groups or model.num_attention_heads) * dim
        self.wq = nn.Linear(model.hidden_size, queries, bias=model.add_qkv_bias)
        self.wk = nn.Linear(model.hidden_size, keys, bias=model.add_qkv_bias)
        self.wv = nn.Linear(model.hidden_size, keys, bias=model.add_qkv_bias)
        self.wo = nn.Linear(queries, model.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=model.norm_epsilon) if model.qk_layernorm else nn.Identity()
        self.k_norm = nn.RMSNorm(dim, eps=model.norm_epsilon) if model.qk_layernorm else nn.Identity()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each sequence of `x`; `cos` and `sin` are [s, head_dim]."""
        q = rotate(self.q_norm(self._heads(self.wq(x))), cos, sin)
        k = rotate(self.k_norm(self._heads(self.wk(x))), cos, sin)
        v = self._heads(self.wv(x))
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU [b, s, h] -> [b, s, h]: w2(silu(w1 x) * w3 x) (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)
        self.w2 = nn.Linear(ffn_hidden_size, hidden_size, bias=False)
        self.w3 = nn.Linear(hidden_size, ffn_hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the feed-forward to every position."""
        out: Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class DecoderLayer(nn.Module):
    """One pre-norm transformer layer [b, s, h] -> [b, s, h]."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.attention = Attention(model)
        self.attention_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)
        self.feed_forward = FeedForward(model.hidden_size, model.ffn_hidden_size)
        self.ffn_norm = nn.RMSNorm(model.hidden_size, eps=model.norm_epsilon)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention, then the feed-forward, to the residual stream `x`."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out
