"""The schedules API: one step of training or evaluation through a pipeline, under the names that Megatron's users know.

Every function builds a schedule value and this rank's stages, and hands them to the one interpreter (`run_schedule`),
as `ppctl train` does. Must not know files or ppctl's own models.
"""

from ppctl.engine.interpreter import Engine, EngineError
from ppctl.engine.pace import Heartbeat
from ppctl.engine.recorder import Recorder
from ppctl.engine.stage import StageProgram
from ppctl.schedule.table import convert_schedule_table_to_order, get_schedule_table
from ppctl.schedules.functions import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from ppctl.schedules.loss import forward_step_calc_loss
from ppctl.schedules.microbatches import check_first_val_step, get_pp_rank_microbatches, set_current_microbatch
from ppctl.schedules.run import run_schedule
from ppctl.schedules.shapes import get_tensor_shapes
from ppctl.schedules.steps import backward_step, custom_backward, deallocate_output_tensor, forward_step
from ppctl.schedules.wgrad import clear_embedding_activation_buffer, finish_embedding_wgrad_compute

__all__ = [
    "Engine",
    "EngineError",
    "Heartbeat",
    "Recorder",
    "StageProgram",
    "backward_step",
    "check_first_val_step",
    "clear_embedding_activation_buffer",
    "convert_schedule_table_to_order",
    "custom_backward",
    "deallocate_output_tensor",
    "finish_embedding_wgrad_compute",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "forward_step",
    "forward_step_calc_loss",
    "get_forward_backward_func",
    "get_pp_rank_microbatches",
    "get_schedule_table",
    "get_tensor_shapes",
    "run_schedule",
    "set_current_microbatch",
]
