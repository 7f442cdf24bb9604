"""The door to the engine: a schedule, the stages' programs and a communicator go in, one step is run.

Knows where a policy meets the engine. Must not know configs, models or data. The schedule helpers of Megatron's
pipeline_parallel package live beside it under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist

from ppctl.comm.p2p_communication import P2PCommunicator
from ppctl.engine.interpreter import Engine, EngineError, Heartbeat
from ppctl.engine.recorder import Recorder
from ppctl.engine.stage import StageProgram
from ppctl.schedule.action import Schedule
from ppctl.schedule.policies import (
    WarmupCounts,
    convert_schedule_table_to_order,
    get_schedule_table,
    warmup_counts,
)

__all__ = [
    "Engine",
    "EngineError",
    "Heartbeat",
    "Recorder",
    "StageProgram",
    "convert_schedule_table_to_order",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "run_schedule",
]


def run_schedule(
    schedule: Schedule,
    programs: Sequence[StageProgram],
    communicator: P2PCommunicator | None = None,
    *,
    deallocate_pipeline_outputs: bool = True,
    reduce_grad: Callable[[int], None] | None = None,
    recorder: Recorder | None = None,
    heartbeat: Heartbeat | None = None,
) -> None:
    """Execute this rank's part of one step: all microbatches through this rank's stages.

    `schedule` is lowered (`ppctl.schedule.passes.lower`), the same value on every rank; without backwards in it, it
    runs under no_grad. `programs` are this rank's stages. The loss is what the last stage's program returns, already
    scaled; the engine never modifies it. Gradients accumulate into `.grad` in the order of the backwards in the list.
    `communicator` is the pipeline's, and may be missing where it has one rank; it keeps channels and buffers from call
    to call. `deallocate_pipeline_outputs` frees an output once it is delivered, else it lives until its backward.
    `reduce_grad(stage)` is called when a stage's gradients are complete. `recorder` stamps the actions, and must have
    been made for this rank's list; `heartbeat` is told each action's index.

    Raises ScheduleError where the arguments do not belong together, and EngineError, naming the action, where an action
    fails. After an EngineError the communicator must not be used again: peers may be in the middle of a message.
    """
    Engine(
        schedule,
        programs,
        communicator,
        deallocate_pipeline_outputs=deallocate_pipeline_outputs,
        reduce_grad=reduce_grad,
        recorder=recorder,
        heartbeat=heartbeat,
    ).run()


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
