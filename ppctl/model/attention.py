"""Grouped-query self-attention [b, s, h] -> [b, s, h], b microbatch, s sequence, h hidden.

Knows ModelConfig's heads. Must not know layers, stages or weights' values. Attribute names are canonical parameter
names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.geometry.layers import head_dim, query_groups
from ppctl.model.core_attention import core_attention
from ppctl.model.dropout import Draws, Dropout
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.linear import Linear
from ppctl.model.norms import make_norm
from ppctl.model.packing import Documents
from ppctl.model.rotary import rotate


class Attention(nn.Module):
    """Causal self-attention [b, s, h] -> [b, s, h]; `num_attention_heads` queries share `num_query_groups` keys.

    With `qk_layernorm`, queries and keys are normalised per head before they are turned (as Qwen3 does). With
    `rotary_percent` below 1 only the first dimensions of a head are turned (as GLM-4.5 does).
    """

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__()
        self.kernels, self.dropout = kernels, Dropout(model.attention_dropout)
        dim = self.head_dim = head_dim(model)
        queries = model.num_attention_heads * dim
        keys = query_groups(model) * dim
        biases = model.add_qkv_bias or model.add_bias_linear
        self.wq = Linear(model.hidden_size, queries, bias=biases, fp8=kernels.fp8)
        self.wk = Linear(model.hidden_size, keys, bias=biases, fp8=kernels.fp8)
        self.wv = Linear(model.hidden_size, keys, bias=biases, fp8=kernels.fp8)
        self.wo = Linear(queries, model.hidden_size, bias=model.add_bias_linear, fp8=kernels.fp8)
        self.interleaved = model.rotary_interleaved
        self.q_norm = make_norm(model, dim) if model.qk_layernorm else nn.Identity()
        self.k_norm = make_norm(model, dim) if model.qk_layernorm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        cos: Tensor | None,
        sin: Tensor | None,
        documents: Documents | None = None,
        draws: Draws | None = None,
    ) -> Tensor:
        """Attend within each sequence of `x`, or document; `cos` and `sin` as `Rotary.tables` gives them, or none."""
        shared = self.wq.operand(x)
        q = rotate(self.q_norm(self._heads(self.wq(shared))), cos, sin, interleaved=self.interleaved)
        k = rotate(self.k_norm(self._heads(self.wk(shared))), cos, sin, interleaved=self.interleaved)
        v = self._heads(self.wv(shared))
        out: Tensor = self.wo(self.mix(q, k, v, documents, draws))
        return out

    def mix(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Documents | None = None, draws: Draws | None = None
    ) -> Tensor:
        """The heads' weighted values, side by side: what is recomputed as `core_attn`."""
        dropped = self.dropout.of_attention(draws)
        return core_attention(q, k, v, self.kernels, documents, dropped=dropped)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim).transpose(1, 2)
