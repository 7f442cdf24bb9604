"""The facts that decide how large layers' activations are: sizes, bytes of an element, and whose blocks compute."""

from __future__ import annotations

from typing import NamedTuple

from ppctl.config.schema import ModelConfig, ParallelConfig, TrainConfig
from ppctl.cost.context_parallelism import Levels
from ppctl.geometry.parameters import Sizes
from ppctl.host.accelerators import MEGATRON, PPCTL
from ppctl.topology import ParallelSizes


class Allocator(NamedTuple):
    """The activations that the blocks of one system (torch, Megatron) keep."""

    name: str
    norm_statistics: int
    """fp32 statistics per token that a norm keeps: RMSNorm one, LayerNorm two; 0 if they are not counted."""
    fp32_norms: bool
    """Whether norms run unfused in fp32, and keep their input and the normalised input in fp32."""
    logit_bytes: int | None
    """Bytes per logit, from the loss's forward to its backward. None: only the logits, in the product's dtype."""
    fused_logit_bytes: int | None
    """Bytes per logit, with a fused cross entropy."""
    cublas_workspaces: int
    """cuBLAS workspaces, one per thread: the forward's and autograd's."""
    chunk_buffers: int
    """Hidden states of a microbatch that stay alive for every chunk."""
    receives: bool
    """Whether receives are posted ahead into buffers of their own."""
    backward: bool = False
    """Whether bytes that live only while a layer's backward runs are counted (`in_backward`)."""
    transformer_engine: bool = False
    dummy_weight_gradients: bool = False
    """Whether one 16-bit weight gradient stays alive for every distinct shape of a weight."""


_TORCH = Allocator("torch", 1, False, None, None, 2, 0, receives=True, backward=True)

_MEGATRON = Allocator("megatron", 0, False, 6, 4, 2, 2, receives=False, transformer_engine=True)

ALLOCATORS = {
    # ppctl's own blocks as autograd runs them on a GPU: logits, whose gradient takes their place; norms fused.
    "torch": _TORCH,
    # Megatron-core with Transformer Engine: 16-bit logits beside the loss's fp32. Source: the rule of
    # tests/golden/memory_settings.json. Its native fused cross entropy keeps more by version; this is Transformer
    # Engine's, 16-bit logits and their gradient.
    "megatron": _MEGATRON,
    # Transformer Engine 2.11 keeps a dummy weight gradient per shape. Source: tests/golden/simumax_settings.json.
    "megatron_te_2.11": _MEGATRON._replace(name="megatron_te_2.11", dummy_weight_gradients=True),
}

ALLOCATOR_OF = {PPCTL: "torch", MEGATRON: "megatron"}
"""A stack's own allocator."""

TORCH_ON_CPU = _TORCH._replace(name="torch on the CPU", fp32_norms=True, cublas_workspaces=0)
"""torch's CPU build runs RMSNorm step by step. Checked by tests/dist/train/test_plan_memory.py."""


def for_norms(allocator: Allocator, normalization: str) -> Allocator:
    """The allocator for norms of this kind: LayerNorm is one kernel everywhere, and keeps two numbers."""
    if normalization != "LayerNorm":
        return allocator
    return allocator._replace(norm_statistics=2 * allocator.norm_statistics, fp32_norms=False)


class Setting(NamedTuple):
    """The sizes and options on which the activations of a layer depend, beside the layer itself."""

    micro_batch_size: int
    seq_length: int
    element: int
    """Bytes of an element of an activation."""
    sizes: ParallelSizes = ParallelSizes(1)
    sequence_parallel: bool = False
    fused_loss: bool = False
    allocator: Allocator = ALLOCATORS["torch"]
    """The system whose blocks run."""
    train: TrainConfig = TrainConfig()
    """The config with the keys `recompute_*`."""
    packed: bool = False
    """Whether documents are kept apart: then attention has a result per document beside the whole one."""
    levels: Levels | None = None
    """The levels of context parallelism, if it has two."""
    parallel: ParallelConfig = ParallelConfig()
    """The config with the keys `cpu_offloading_*`."""
    nodes: int = 1
    """Nodes by which tokens are dispatched to experts (`dispatch_nodes`)."""
    deferred: bool = False
    """Whether backwards are the I of split ones: they make no weight gradients, and keep the operands for W."""
    narrow: bool = False
    """Whether inputs of products are kept in 8 bits."""

    @property
    def operand(self) -> int:
        """Bytes of an element that is kept as the input of a product."""
        return 1 if self.narrow else self.element

    @property
    def wide_bytes(self) -> int:
        """Bytes of an element that is computed in float32 or wider, as in norms, scores and losses."""
        return max(4, self.element)

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on one device."""
        return self.micro_batch_size * -(-self.seq_length // self.sizes.cp)

    @property
    def logit_bytes(self) -> int | None:
        """Bytes per logit that the allocator keeps."""
        return self.allocator.fused_logit_bytes if self.fused_loss else self.allocator.logit_bytes

    @property
    def sp(self) -> int:
        """The number of ranks that divide the residual stream."""
        return self.sizes.tp if self.sequence_parallel else 1

    def hidden_bytes(self, model: ModelConfig) -> int:
        """Bytes of a microbatch's hidden state on one device, between blocks."""
        return self.whole_bytes(model) // self.sp

    def whole_bytes(self, model: ModelConfig) -> int:
        """Bytes of the hidden state that blocks compute with: of all tokens of the tensor-parallel ranks."""
        return self.tokens * model.hidden_size * self.element

    def travelling(self, model: ModelConfig) -> int:
        """Bytes of all tokens' hidden state while gathered or scattered: several samples need a reordered copy."""
        return self.whole_bytes(model) * (1 if self.micro_batch_size == 1 else 2)

    def groups(self, sizes: Sizes) -> float:
        """Groups of keys and values on one device, times tp: a rank has one at least."""
        return sizes.heads if sizes.latent else max(sizes.groups, self.sizes.tp)

    def words(self, model: ModelConfig) -> int:
        """The most tokens of the vocabulary that are on one device."""
        return -(-model.vocab_size // self.sizes.tp)
