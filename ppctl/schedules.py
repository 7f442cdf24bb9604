"""The functions of `ppctl.megatron` and the engine's door, under the name that they had before."""

from ppctl.engine.interpreter import Engine, EngineError, run_schedule
from ppctl.engine.pace import Heartbeat
from ppctl.engine.recorder import Recorder
from ppctl.engine.stage import StageProgram
from ppctl.megatron import (
    backward_step,
    check_first_val_step,
    clear_embedding_activation_buffer,
    convert_schedule_table_to_order,
    custom_backward,
    deallocate_output_tensor,
    finish_embedding_wgrad_compute,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    forward_step,
    forward_step_calc_loss,
    get_forward_backward_func,
    get_pp_rank_microbatches,
    get_schedule_table,
    get_tensor_shapes,
    set_current_microbatch,
)

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
