"""Megatron's `ModelParallelConfig`: every documented field, its documented default, and the rules between fields.

Torch-free: dtype fields hold a `torch.dtype` or its name. `problems` states the rules; `__post_init__` raises from it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from ppctl.config.metadata import (
    IGNORED,
    LATER,
    MOST_PP_RANKS,
    MOST_RANKS,
    MOST_SAMPLES,
    MOST_STAGES,
    NEEDS,
    PYTHON,
    Support,
    key,
    not_negative,
    one_of,
    positive,
    sizes,
)
from ppctl.errors import ConfigError, Problem

CODE = "PP-E117"

DTYPES = {
    "float32": ("float32", "fp32", "float", "single"),
    "bfloat16": ("bfloat16", "bf16"),
    "float16": ("float16", "fp16", "half"),
    "float64": ("float64", "fp64", "double"),
}
"""Canonical dtype name -> the spellings that mean it."""

_USERBUFFERS = Support(NEEDS, "Transformer Engine's userbuffers")
_DEPRECATED = Support(IGNORED, "it is deprecated")
_OBJECT = Support(PYTHON, "on the config of a model that the schedules' functions run")
_PLAIN = "from Python: the schedules' functions do it in plain torch"


class ModelParallelConfigError(ConfigError, ValueError):
    """Fields of a ModelParallelConfig that contradict each other."""


def dtype_name(value: Any) -> str | None:
    """The canonical name of `torch.bfloat16`, `"bf16"`, ...; None for None. Raises ValueError for what is no dtype."""
    if value is None:
        return None
    text = str(value).removeprefix("torch.").lower()
    for name, spellings in DTYPES.items():
        if text in spellings:
            return name
    raise ValueError(f"{value!r} is no dtype of a model: use {', '.join(DTYPES)}")


@dataclass
class ModelParallelConfig:
    """How a model is split over ranks and how its pipeline communicates. Raises ValueError where fields contradict.
    Models add what they need to it (`config.hidden_size = ...`), as Megatron's do: therefore no slots."""

    tensor_model_parallel_size: int = key(
        1,
        positive(MOST_RANKS),
        names="tp --tensor-model-parallel-size",
        known_as="tensor_parallel_degree --model-parallel-size",
    )
    """Ranks that share each layer's matrices (tp)."""
    pipeline_model_parallel_comm_backend: str | None = key(
        None, one_of("nccl", "gloo", "ucc"), support=Support(note="NCCL between ranks: not yet run")
    )
    """Backend of the pipeline's process groups; none takes the device's own (nccl or gloo)."""
    pipeline_model_parallel_size: int = key(
        1,
        positive(MOST_PP_RANKS),
        names="pp --pipeline-model-parallel-size",
        known_as="pipeline_parallel_degree",
        layout=True,
    )
    """Pipeline ranks, over which the layers are divided (pp)."""
    virtual_pipeline_model_parallel_size: int | None = key(
        None,
        positive(MOST_STAGES),
        names="vpp --virtual-pipeline-model-parallel-size --num-virtual-stages-per-pipeline-rank"
        " parallel.num_virtual_stages_per_pipeline_rank model.virtual_pipeline_model_parallel_size",
        layout=True,
    )
    """Stages (chunks) per pp_rank (vpp); none derives it from the layout, else 1."""
    sequence_parallel: bool = key(False, names="sp sequence_parallel model.sequence_parallel")
    """Split norms and dropout along the sequence over the tensor-parallel ranks. Needs tp > 1."""
    context_parallel_size: int = key(
        1,
        positive(MOST_RANKS),
        names="cp --context-parallel-size",
        known_as="context_parallel_degree",
    )
    """Ranks that share one sequence, each with a slice of it (cp)."""
    hierarchical_context_parallel_sizes: list[int] | None = key(
        None, sizes(2, least=2), names="--hierarchical-context-parallel-sizes"
    )
    """For `model.cp_comm_type=a2a+p2p`: [neighbours that exchange heads, groups in a ring]; their product is cp."""
    expert_model_parallel_size: int = key(
        1, positive(MOST_RANKS), names="ep --expert-model-parallel-size", known_as="expert_parallel_degree"
    )
    """Ranks that the experts of an MoE layer are spread over (ep)."""
    expert_tensor_parallel_size: int | None = key(None, positive(MOST_RANKS), names="etp --expert-tensor-parallel-size")
    """Ranks that share one expert's matrices (etp); none means the tensor-parallel size."""
    moe_extended_tp: bool = key(False, support=Support(IGNORED, "expert_tensor_parallel_size took its place"))
    """Superseded by expert_tensor_parallel_size; Megatron ignores it as well."""
    perform_initialization: bool = key(True, support=Support(LATER))
    """Give the weights their initial values; false where a checkpoint will overwrite them."""
    use_cpu_initialization: bool = key(False, support=Support(IGNORED, "initial weights never depend on the device"))
    """Draw initial weights on the CPU. ppctl's never depend on the device or on the split."""
    fp16: bool = key(False, mathematics=True)
    """Mixed precision in float16, with loss scaling."""
    bf16: bool = key(False, known_as="precision", mathematics=True)
    """Mixed precision in bfloat16: bf16 weights, fp32 gradients and master weights."""
    params_dtype: Any = key(None, mathematics=True)
    """dtype of the weights (`torch.bfloat16` or "bfloat16"); none means bfloat16 with bf16, else float32.
    float64 computes, sums, sends and saves everything in float64."""
    timers: Callable[..., Any] | None = key(None, support=_OBJECT)
    """Object called for the timers of a training loop. Python only."""
    finalize_model_grads_func: Callable[..., Any] | None = key(None, support=_OBJECT)
    """Called after the last backward to finish gradients across ranks. Python only."""
    grad_scale_func: Callable[..., Any] | None = key(None, support=_OBJECT)
    """Maps the loss to the scaled loss before the backward; none scales nothing. Python only."""
    no_sync_func: Callable[..., Any] | None = key(None, support=_OBJECT)
    """Makes a context in which the data-parallel wrapper does not communicate. Python only."""
    grad_sync_func: Callable[..., Any] | None = key(None, support=_OBJECT)
    """Called with parameters: starts the reduction of their gradients. Python only."""
    param_sync_func: Callable[..., Any] | None = key(None, support=_OBJECT)
    """Called with parameters: starts gathering them. Python only."""
    deterministic_mode: bool = False
    """Choose deterministic kernels only."""
    enable_autocast: bool = False
    """Run the forward step inside torch.autocast."""
    autocast_dtype: Any = key(None, mathematics=True, needs="parallel.enable_autocast=true")
    """dtype of the autocast of enable_autocast; none takes pipeline_dtype, else params_dtype."""
    num_microbatches_with_partial_activation_checkpoints: int | None = key(
        None, not_negative(MOST_SAMPLES), needs="train.recompute_granularity=full"
    )
    """Microbatches of the warm-up window whose layers are recomputed only in part; none leaves it to the model."""
    gradient_accumulation_fusion: bool = key(
        False, support=Support(NEEDS, "APEX's fused_weight_gradient_mlp_cuda", _PLAIN)
    )
    """Add weight gradients into their accumulator inside the matrix product. Needs a CUDA extension of APEX."""
    async_tensor_model_parallel_allreduce: bool = key(False, support=_DEPRECATED)
    """Deprecated; Megatron ignores it as well."""
    use_te_rng_tracker: bool = key(False, support=Support(NEEDS, "Transformer Engine"))
    """Use Transformer Engine's random state tracker."""
    tp_comm_overlap: bool = key(False, support=_USERBUFFERS)
    """Overlap tensor-parallel collectives with linear layers (Transformer Engine's userbuffers)."""
    tp_comm_bulk_wgrad: bool = key(True, support=_USERBUFFERS)
    """With tp_comm_overlap: gather inputs while the input gradient is computed."""
    tp_comm_bulk_dgrad: bool = key(True, support=_USERBUFFERS)
    """With tp_comm_overlap: scatter gradients while the weight gradient is computed."""
    tp_comm_overlap_ag: bool = key(True, support=_USERBUFFERS)
    """With tp_comm_overlap: pipeline the all-gather with its matrix product."""
    tp_comm_overlap_rs: bool = key(True, support=_USERBUFFERS)
    """With tp_comm_overlap: pipeline the reduce-scatter with its matrix product."""
    tp_comm_overlap_rs_dgrad: bool = key(False, support=_USERBUFFERS)
    """With tp_comm_overlap: pipeline the reduce-scatter with the input-gradient product."""
    tp_comm_split_ag: bool = key(True, support=_DEPRECATED)
    """Deprecated form of tp_comm_overlap_ag."""
    tp_comm_atomic_ag: bool = key(False, support=_DEPRECATED)
    """Deprecated atomic form of the pipelined all-gather."""
    tp_comm_split_rs: bool = key(True, support=_DEPRECATED)
    """Deprecated form of tp_comm_overlap_rs."""
    tp_comm_atomic_rs: bool = key(False, support=_DEPRECATED)
    """Deprecated atomic form of the pipelined reduce-scatter."""
    cross_entropy_loss_fusion: bool = key(
        False, support=Support(note="ppctl's own loss is always fused; plans of Megatron's memory depend on this")
    )
    """Use a fused cross entropy, in which ranks that share a vocabulary gather no logits."""
    cross_entropy_fusion_impl: str = key(
        "native", one_of("native", "te"), support=Support(NEEDS, "Transformer Engine", "`native` is ppctl's own loss")
    )
    """Which fused cross entropy: `native` or `te` (Transformer Engine)."""
    tp_comm_overlap_disable_qkv: bool = key(False, support=_USERBUFFERS)
    """With tp_comm_overlap: leave the QKV projection out of it."""
    tp_comm_overlap_disable_fc1: bool = key(False, support=_USERBUFFERS)
    """With tp_comm_overlap: leave the first feed-forward matrix out of it."""
    tp_comm_bootstrap_backend: str = key("nccl", support=_USERBUFFERS)
    """With tp_comm_overlap: who exchanges its buffers at start-up: `nccl`, `mpi` or `gloo`."""
    overlap_moe_expert_parallel_comm: bool = False
    """Run the next microbatch's forward beside every backward of 1F1B: one's exchange of experts travels while the
    other computes. Every rank keeps one more microbatch. DualPipeV has such pairs without this key where ep > 1."""
    delay_wgrad_compute: bool = False
    """With overlap_moe_expert_parallel_comm: compute the weight gradients of a pair's backward after the pair."""
    pipeline_dtype: Any = key(None, mathematics=True)
    """dtype of the tensors sent between stages; with pp > 1 it has to be known (runs take params_dtype)."""
    variable_seq_lengths: bool = False
    """Sequence length differs between microbatches: exchange shapes before every message."""
    overlap_p2p_comm: bool = False
    """Messages between stages travel while a stage computes. Excludes batch_p2p_comm."""
    batch_p2p_comm: bool = True
    """Wait for neighbouring sends and receives together (NCCL: batch_isend_irecv). Excludes overlap_p2p_comm."""
    batch_p2p_sync: bool = True
    """Synchronise the device after each fused exchange (a workaround for old versions of torch)."""
    use_ring_exchange_p2p: bool = key(False, support=Support(NEEDS, "a custom build of torch with ring_exchange"))
    """Use the ring_exchange kernel of a custom build of torch."""
    deallocate_pipeline_outputs: bool = False
    """Free a stage's output once it is sent; the backward keeps what it needs."""
    defer_embedding_wgrad_compute: bool = key(
        False, support=Support(NEEDS, "gradient_accumulation_fusion (APEX)", _PLAIN)
    )
    """Move the output layer's weight gradients into the pipeline's flush."""
    wgrad_deferral_limit: int = key(
        0, not_negative(MOST_SAMPLES), support=Support(NEEDS, "gradient_accumulation_fusion (APEX)", _PLAIN)
    )
    """With defer_embedding_wgrad_compute: how many microbatches' weight gradients are moved; 0 means all."""
    overlap_p2p_comm_warmup_flush: bool = key(
        False, support=Support(note="channels overlap warm-up and flush in any case")
    )
    """Overlap messages in warm-up and flush, too. Needs overlap_p2p_comm without batch_p2p_comm."""
    microbatch_group_size_per_vp_stage: int | None = key(
        None, positive(MOST_SAMPLES), names="--microbatch-group-size-per-virtual-pipeline-stage"
    )
    """Microbatches that a chunk runs in a row under interleaving; none means the pipeline size."""
    cpu_offloading: bool = False
    """Move activations of every stage's first decoder layers to host memory, from forward to backward."""
    cpu_offloading_num_layers: int = key(0, not_negative(MOST_STAGES), needs="parallel.cpu_offloading=true")
    """The decoder layers of every stage (with vpp: chunk) that cpu_offloading covers; all, if the stage has fewer."""
    _cpu_offloading_context: AbstractContextManager[Any] | None = key(
        None, support=Support(IGNORED, "it is internal to cpu_offloading")
    )
    """Internal."""
    cpu_offloading_activations: bool = True
    """With cpu_offloading: move activations."""
    cpu_offloading_weights: bool = key(
        False,
        support=Support(NEEDS, "Transformer Engine", "its own switch has lost its effect: weights stay in any case"),
    )
    """With cpu_offloading: move weights that autograd saves."""
    cpu_offloading_double_buffering: bool = key(
        False, support=Support(IGNORED, "a layer is always fetched while the one after it computes")
    )
    """With cpu_offloading: two buffers when activations are fetched back."""
    barrier_with_L1_time: bool = key(
        True, support=Support(IGNORED, "a run has no timers; those of the schedules' functions obey it")
    )
    """Put a barrier around timers of level 1."""

    def __post_init__(self) -> None:
        """Check the rules, then fill what follows from other fields, as Megatron does."""
        broken = problems(self)
        if broken:
            raise ModelParallelConfigError(broken)
        for text in cautions(self):
            warnings.warn(text, stacklevel=3)
        if self.expert_tensor_parallel_size is None:
            self.expert_tensor_parallel_size = self.tensor_model_parallel_size
        if self.autocast_dtype is None:
            self.autocast_dtype = self.pipeline_dtype or self.params_dtype or "float32"
        if self.microbatch_group_size_per_vp_stage is None:
            self.microbatch_group_size_per_vp_stage = self.pipeline_model_parallel_size


def problems(config: ModelParallelConfig) -> list[Problem]:
    """Every rule between fields that `config` breaks (source: Megatron-core's documented constraints)."""
    return [Problem(CODE, message, remedy) for message, remedy in _broken_rules(config)]


def _broken_rules(config: ModelParallelConfig) -> Iterator[tuple[str, str]]:
    """(message, remedy) of each broken rule."""
    tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    if config.sequence_parallel and tp <= 1:
        message = f"sequence_parallel splits over the tensor-parallel ranks, but tensor_model_parallel_size is {tp}"
        yield message, "parallel.sequence_parallel=false"
    if pp > 1 and config.pipeline_dtype is None:
        message = f"pipeline_model_parallel_size is {pp}, but pipeline_dtype is unset: stages must agree on it"
        yield message, "parallel.pipeline_dtype=float32"
    overlaps, batches = config.overlap_p2p_comm, config.batch_p2p_comm
    if config.overlap_p2p_comm_warmup_flush and (not overlaps or batches):
        message = "overlap_p2p_comm_warmup_flush needs overlap_p2p_comm true and batch_p2p_comm false, not "
        yield f"{message}{overlaps} and {batches}", "parallel.overlap_p2p_comm=true parallel.batch_p2p_comm=false"
    if config.defer_embedding_wgrad_compute:
        yield from _broken_deferral(config)


def _broken_deferral(config: ModelParallelConfig) -> Iterator[tuple[str, str]]:
    remedy = "parallel.defer_embedding_wgrad_compute=false"
    if config.pipeline_model_parallel_size == 1:
        message = "defer_embedding_wgrad_compute moves work into the pipeline's flush, but there is one pipeline rank"
        yield message, remedy
    if not config.gradient_accumulation_fusion:
        yield "defer_embedding_wgrad_compute needs gradient_accumulation_fusion", remedy
    if config.wgrad_deferral_limit < 0:
        message = f"wgrad_deferral_limit must be 0 or more microbatches, not {config.wgrad_deferral_limit}"
        yield message, "parallel.wgrad_deferral_limit=0"


def cautions(config: ModelParallelConfig) -> list[str]:
    """Settings that are legal but likely not meant."""
    notes = []
    if config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl == "te":
        notes.append("Transformer Engine's fused cross entropy is known to be unstable; `native` is the safe choice")
    if config.expert_model_parallel_size > 1 and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        notes.append("expert and tensor parallelism together need sequence_parallel for training")
    return notes
