"""Megatron-core's functions: one step of training or evaluation through a pipeline, under Megatron's own names.

Every function builds a schedule value and this rank's stages, and hands them to the one interpreter (`run_schedule`),
as `ppctl train` does, with `P2PCommunicator` for the messages; `adopt` puts both in Megatron's places. Must not know
ppctl's own models.
"""

from ppctl.megatron.adoption import adopt, release
from ppctl.megatron.functions import (
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)
from ppctl.megatron.loss_function import forward_step_calc_loss
from ppctl.megatron.message_shapes import get_tensor_shapes
from ppctl.megatron.pipelines import on_v
from ppctl.megatron.steps import (
    backward_step,
    check_first_val_step,
    custom_backward,
    deallocate_output_tensor,
    forward_step,
    get_pp_rank_microbatches,
    set_current_microbatch,
)
from ppctl.megatron.wgrad import clear_embedding_activation_buffer, finish_embedding_wgrad_compute
from ppctl.schedule.schedule_table import convert_schedule_table_to_order, get_schedule_table

__all__ = [
    "adopt",
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
    "on_v",
    "release",
    "set_current_microbatch",
]
