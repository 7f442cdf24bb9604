"""Which microbatch, and how many: Megatron's warm-up counts, and what a model learns about its microbatch.

Must not know the engine.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ppctl.megatron.models import holder_of
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.schedule.schedule_table import WarmupCounts, warmup_counts


def get_pp_rank_microbatches(
    num_microbatches: int,
    num_model_chunks: int,
    microbatch_group_size_per_vp_stage: int,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
    p2p_communicator: P2PCommunicator | None = None,
) -> WarmupCounts:
    """How this rank's microbatches divide: (total, all_in_warmup, warmup, remaining), counted over all chunks.

    The communicator has the group's size and rank, and the virtual pipeline size: with one, even 1, the counts are
    those of the interleaved schedule. Without a communicator the pipeline is the world, if there is one.
    """
    if p2p_communicator is None:
        pp, pp_rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        interleaved = num_model_chunks > 1
    else:
        pp, pp_rank = p2p_communicator.pp_group.size(), p2p_communicator.pp_group.rank()
        interleaved = p2p_communicator.virtual_pipeline_model_parallel_size is not None
    return warmup_counts(
        pp,
        pp_rank,
        num_microbatches=num_microbatches,
        num_model_chunks=num_model_chunks,
        microbatch_group_size_per_vp_stage=microbatch_group_size_per_vp_stage,
        interleaved=interleaved,
        forward_only=forward_only,
        overlap_moe_expert_parallel_comm=overlap_moe_expert_parallel_comm,
    )


def check_first_val_step(first_val_step: bool | None, forward_only: bool, cond: bool) -> bool:
    """The flag for the first microbatch: `cond`, and in a validation with `first_val_step` only in its first step."""
    return bool(first_val_step and cond) if forward_only and first_val_step is not None else cond


def set_current_microbatch(model: Any, microbatch_id: int) -> None:
    """Tell every layer of the model's decoder, and of its multi-token prediction, its microbatch."""
    holder = holder_of(model, "decoder")
    for layer in getattr(getattr(holder, "decoder", None), "layers", ()):
        layer.current_microbatch = microbatch_id
    for layer in getattr(getattr(holder, "mtp", None), "layers", ()):
        getattr(layer, "transformer_layer", layer).current_microbatch = microbatch_id
