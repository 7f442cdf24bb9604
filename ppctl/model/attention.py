"""Grouped-query self-attention [b, s, h] -> [b, s, h], b microbatch, s sequence, h hidden.

Attribute names are canonical parameter names: renaming one renames a checkpoint key.
"""

from __future__ import annotations

from torch import Tensor, nn

from ppctl.config.schema import ModelConfig
from ppctl.model.core_attention import SelfAttention
from ppctl.model.dropout import Draws
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.linear import Linear, Projection, columns, from_columns
from ppctl.model.norms import make_norm
from ppctl.model.packing import Documents
from ppctl.model.rotary import rotate


class Attention(SelfAttention):
    """Causal self-attention [b, s, h] -> [b, s, h]; `num_attention_heads` queries share `num_query_groups` keys.

    With `qk_layernorm`, queries and keys are normalised per head before they are turned (as Qwen3 does). With
    `rotary_percent` below 1 only the first dimensions of a head are turned (as GLM-4.5 does).
    """

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__(model, kernels)
        dim = self.head_dim = model.head_dim
        queries = model.num_attention_heads * dim
        self.groups = model.query_groups
        keys = self.groups * dim
        biases = model.add_qkv_bias or model.add_bias_linear
        self.wq = Linear(model.hidden_size, queries, bias=biases, fp8=kernels.fp8)
        self.wk = Linear(model.hidden_size, keys, bias=biases, fp8=kernels.fp8)
        self.wv = Linear(model.hidden_size, keys, bias=biases, fp8=kernels.fp8)
        self.wo = Linear(queries, model.hidden_size, bias=model.add_bias_linear, fp8=kernels.fp8)
        self.q_norm = make_norm(model, dim) if model.qk_layernorm else nn.Identity()
        self.k_norm = make_norm(model, dim) if model.qk_layernorm else nn.Identity()

    def forward(
        self, x: Tensor, turns: Tensor | None, documents: Documents | None = None, draws: Draws | None = None
    ) -> Tensor:
        """Attend within each sequence of `x`, or document; `turns` as `Rotary.turns` gives them, or none."""
        q, k, v = (self._heads(each) for each in columns(x, self.wq, *self._keys_values(), split=self.split))
        # Norms lose a layout in which heads do not come first.
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        q = rotate(q, turns, interleaved=self.interleaved)
        k = rotate(k, turns, interleaved=self.interleaved)
        return from_columns(self.mix(q, k, v, documents, draws), self.wo, self.split)

    def _keys_values(self) -> tuple[Linear | Projection, Linear | Projection]:
        """The rank's key/value groups; if there are more ranks than groups, several ranks have the same one."""
        if self.split is None or self.groups % self.split.size == 0:
            return self.wk, self.wv
        first = self.groups * self.split.rank // self.split.size * self.head_dim
        own = slice(first, first + self.head_dim)
        return self.wk.outputs(own), self.wv.outputs(own)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self.head_dim)  # side by side
