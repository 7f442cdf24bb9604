"""Named presets of who keeps what: whose kernels a plan assumes, and what lives beside weights and activations.

Knows what the kernels of a system save and which workspaces it holds. Must not know models, ranks or schedules.
"""

from __future__ import annotations

from typing import NamedTuple

MIB = 2**20


class Allocator(NamedTuple):
    """What one system's blocks keep."""

    name: str
    gated_vectors: int
    """Vectors of the inner width that a gated feed-forward keeps (an ungated one keeps 2)."""
    expert_copies: int
    """Vectors of the hidden width for every chosen expert: the token's copy, and the expert's output."""
    norm_statistics: bool
    """Whether the fp32 statistics of norms are counted."""
    fp32_norms: bool
    """Norms are run step by step in fp32 and keep their input and the normalised input so."""
    logit_bytes: int
    """Per logit, from the loss's forward to its backward."""
    fused_logit_bytes: int
    """The same with a fused cross entropy."""
    cublas_workspaces: int
    """One per thread that multiplies: forward's and autograd's."""
    chunk_buffers: int
    """Hidden states of a microbatch that stay alive for every chunk."""
    receives: bool
    """Whether receives are posted ahead into buffers of their own."""
    gradients: tuple[int, int, int] = (0, 0, 0)
    """Gradients of activations that live at once in a layer's backward: vectors of the inner width, vectors of the
    hidden width, and bytes per logit in the loss's."""
    transformer_engine: bool = False
    dummy_weight_gradients: bool = False
    """One 16-bit weight gradient for every distinct shape of a weight."""


_TORCH = Allocator("torch", 4, 2, True, False, 8, 8, 2, 0, receives=True, gradients=(2, 3, 4))
_MEGATRON = Allocator("megatron", 3, 1, False, False, 6, 4, 2, 2, receives=False, transformer_engine=True)

ALLOCATORS = {
    # ppctl's own blocks as autograd runs them on a GPU: gate, up, silu(gate) and the product; logits and
    # log-probabilities in fp32; norms fused.
    "torch": _TORCH,
    # Megatron-core with Transformer Engine: fused SwiGLU, 16-bit logits beside the loss's fp32. Source: the rule of
    # tests/golden/memory_settings.json. Its native fused cross entropy keeps more by version; this is Transformer
    # Engine's, 16-bit logits and their gradient.
    "megatron": _MEGATRON,
    # Transformer Engine 2.11 keeps a dummy weight gradient per shape. Source: tests/golden/simumax_settings.json.
    "megatron_te_2.11": _MEGATRON._replace(name="megatron_te_2.11", dummy_weight_gradients=True),
}

TORCH_ON_CPU = _TORCH._replace(name="torch on the CPU", fp32_norms=True, cublas_workspaces=0)
"""torch's CPU build runs RMSNorm step by step. Checked by tests/dist/train/test_plan_memory.py."""
