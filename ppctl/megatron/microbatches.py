"""Which microbatch, and how many: counts, flags and ids that the forward-backward functions share.

Knows the arithmetic of warm-up and Megatron's flags for single microbatches. Must not know the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ppctl.megatron.models import holder_of, misuse
from ppctl.megatron.p2p_communication import P2PCommunicator
from ppctl.schedule.action import BACKWARDS, Action, Op
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

    Of the communicator it reads the group's size and rank and the virtual pipeline size, which makes the count that of
    the interleaved schedule wherever it is given, even as 1. Without one the pipeline is the world, if there is one.
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
    """Whether a forward is told that it is the first: `cond`, and in a counted validation in its first step."""
    return bool(first_val_step and cond) if forward_only and first_val_step is not None else cond


def set_current_microbatch(model: Any, microbatch_id: int) -> None:
    """Tell every layer of the model's decoder (`model.decoder.layers`, where there is one) its microbatch."""
    holder = holder_of(model, "decoder")
    for layer in () if holder is None else getattr(holder.decoder, "layers", ()):
        layer.current_microbatch = microbatch_id


def checkpoint_flags(row: Sequence[Action], partial: int | None, window: int) -> dict[Action, bool]:
    """For every forward of a rank's list whether all its layers are to be recomputed; empty where nobody asked.

    Of every `window` forwards, as many as are in flight at most, the first `partial` keep more of their activations.
    """
    if partial is None:
        return {}
    if partial < 0:
        message = f"num_microbatches_with_partial_activation_checkpoints is {partial}: it counts microbatches"
        raise misuse(message, "num_microbatches_with_partial_activation_checkpoints=0")
    forwards = [action for action in row if action.op is Op.F]
    return {action: index % window >= partial for index, action in enumerate(forwards)}


def forwards_in_flight(row: Sequence[Action]) -> int:
    """How many forwards stand before a rank's first backward; without one, one more than there are."""
    forwards = 0
    for action in row:
        if action.op in BACKWARDS:
            return forwards
        forwards += action.op is Op.F
    return forwards + 1
