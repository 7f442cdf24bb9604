"""Multi-head latent attention [b, s, h] -> [b, s, h]: keys and values from one compressed vector a token.

Attribute names are canonical parameter names: renaming one renames a checkpoint key.

Source: the DeepSeek-V2 report, arXiv:2405.04434, section 2.1, with the storage and scales of its published weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ppctl.config.schema import ModelConfig
from ppctl.model.core_attention import SelfAttention
from ppctl.model.dropout import Draws
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.linear import Linear, columns, from_columns
from ppctl.model.norms import make_norm
from ppctl.model.packing import Documents
from ppctl.model.rotary import rotate, yarn_magnitude
from ppctl.model.split import enter

LATENT_NORM_EPSILON = 1e-6
"""Inside the norms of the compressed vectors, whatever the model's own epsilon is: so the family was trained."""


class LatentAttention(SelfAttention):
    """Causal self-attention whose heads are expanded from a compressed query (optional) and a compressed key/value.

    A head has `qk_head_dim` dimensions without positions and `qk_pos_emb_head_dim` with; the keys' part with positions
    is one for all heads. Values have `v_head_dim`.
    """

    def __init__(self, model: ModelConfig, kernels: Kernels = ON_CPU) -> None:
        super().__init__(model, kernels)
        h, heads = model.hidden_size, model.num_attention_heads
        self.q_widths = [model.qk_head_dim, model.qk_pos_emb_head_dim]
        self.latent_widths = [model.kv_lora_rank, model.qk_pos_emb_head_dim]
        self.kv_widths = [model.qk_head_dim, model.v_head_dim]
        queries = heads * sum(self.q_widths)
        if model.q_lora_rank is None:
            self.wq = Linear(h, queries, fp8=kernels.fp8)
        else:
            self.wq_a = Linear(h, model.q_lora_rank, fp8=kernels.fp8)
            self.q_norm = make_norm(model, model.q_lora_rank, LATENT_NORM_EPSILON)
            self.wq_b = Linear(model.q_lora_rank, queries, fp8=kernels.fp8)
        self.wkv_a = Linear(h, sum(self.latent_widths), fp8=kernels.fp8)
        self.kv_norm = make_norm(model, model.kv_lora_rank, LATENT_NORM_EPSILON)
        self.wkv_b = Linear(model.kv_lora_rank, heads * sum(self.kv_widths), fp8=kernels.fp8)
        self.wo = Linear(heads * model.v_head_dim, h, fp8=kernels.fp8)
        self.compresses_queries = model.q_lora_rank is not None
        self.scale = yarn_magnitude(model, model.mscale_all_dim) ** 2 / sum(self.q_widths) ** 0.5

    def forward(
        self, x: Tensor, turns: Tensor, documents: Documents | None = None, draws: Draws | None = None
    ) -> Tensor:
        """Attend within each sequence of `x`, or document; `turns` as `Rotary.turns` gives them."""
        if self.compresses_queries:
            compressed, keys_values = columns(x, self.wq_a, self.wkv_a)
        elif self.split is None:
            compressed, keys_values = columns(x, self.wq, self.wkv_a)
        else:
            (compressed,), keys_values = columns(x, self.wq, split=self.split), self.wkv_a(x)
        q, k, v = self.expand(compressed, keys_values, turns)
        return from_columns(self.mix(q, k, v, documents, draws), self.wo, self.split)

    def expand(self, queries: Tensor, keys_values: Tensor, turns: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of all heads, turned, from what was compressed: recomputed as `mla_up_proj`."""
        if self.compresses_queries:
            (queries,) = columns(self.q_norm(queries), self.wq_b, split=self.split)
        latent, shared = torch.split(keys_values, self.latent_widths, dim=-1)
        (expanded,) = columns(self.kv_norm(latent), self.wkv_b, split=self.split)
        turned = rotate(enter(shared, self.split)[:, None], turns, interleaved=self.interleaved)
        q = _heads(queries, self.q_widths)
        q = rotate(q, turns, first=self.q_widths[0], interleaved=self.interleaved)
        k, v = _KeysValues.apply(_heads(expanded, self.kv_widths), turned, self.kv_widths)  # type: ignore[no-untyped-call]  # torch's own
        return q, k, v


def _heads(x: Tensor, widths: Sequence[int]) -> Tensor:
    """x [b, s, heads x width] by head, [b, heads, s, width], whose width these add up to."""
    return x.view(*x.shape[:2], -1, sum(widths)).transpose(1, 2)


class _KeysValues(torch.autograd.Function):
    """Keys [b, heads, s, width] and values of expanded heads, and of the keys' turned part, which is one for all heads.

    Attention keeps values for its backward: as a view they would also keep the memory of the plain keys, which they
    share. The gradient of the expanded heads is written once, in the layout of the projection's result.
    """

    @staticmethod
    def forward(ctx: Any, heads: Tensor, turned: Tensor, widths: list[int]) -> tuple[Tensor, Tensor]:
        plain, values = torch.split(heads, widths, dim=-1)
        ctx.plain = plain.shape[-1]
        keys = torch.cat((plain, turned.expand(-1, heads.shape[1], -1, -1)), dim=-1)
        return keys, values.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        of_keys, of_values = gradients
        plain, turned = of_keys[..., : ctx.plain], of_keys[..., ctx.plain :]
        of_heads = torch.cat((plain.transpose(1, 2), of_values.transpose(1, 2)), dim=-1).transpose(1, 2)
        return of_heads, turned.sum(1, keepdim=True), None
