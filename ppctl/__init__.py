"""Pipeline-parallel training of language models from one config.

The public names are importable from here, and are loaded when they are asked for: `import ppctl` brings neither torch
nor anything else.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ppctl.schedule.action": ("Action", "Schedule"),
    "ppctl.schedule.policies": ("make_schedule",),
    "ppctl.schedule.schedule_table": ("convert_schedule_table_to_order", "get_schedule_table"),
    "ppctl.schedule.passes": ("lower",),
    "ppctl.schedule.verify": ("verify",),
    "ppctl.schedule.simulate": ("Costs", "simulate"),
    "ppctl.schedule.trace": ("bubble_fraction",),
    "ppctl.comm.communicator": ("Communicator",),
    "ppctl.engine.stage": ("StageProgram",),
    "ppctl.engine.interpreter": ("run_schedule",),
    "ppctl.modules.python_pipeline": ("Pipeline", "pipeline"),
    "ppctl.modules.torch_schedule": ("TorchSchedule",),
    "ppctl.weight_gradients.deferred": ("WeightGradStore",),
    "ppctl.model.outside_kernels": ("Kernel", "KernelUse"),
    "ppctl.train.kernel_check": ("check_kernel",),
    "ppctl.train.callback": ("Callback",),
    "ppctl.weight_gradients.functions": ("split_backward",),
    "ppctl.config.schema": ("RunConfig",),
    "ppctl.config.compose": ("compose",),
    "ppctl.plan": ("Plan", "build_plan"),
    "ppctl.layout": ("LayerType", "PipelineParallelLayerLayout"),
    "ppctl.config.model_parallel_config": ("ModelParallelConfig",),
    "ppctl.config.pipeline_config": ("PipelineConfig",),
    "ppctl.megatron.p2p_communication": ("P2PCommunicator", "Shape", "is_single_shape"),
    "ppctl.megatron.adoption": ("adopt", "release"),
    "ppctl.megatron.forward_backward": (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_with_interleaving",
        "forward_backward_pipelining_without_interleaving",
        "get_forward_backward_func",
    ),
    "ppctl.megatron.message_shapes": ("get_tensor_shapes",),
    "ppctl.megatron.pipelines": ("on_v",),
    "ppctl.megatron.steps": (
        "backward_step",
        "check_first_val_step",
        "custom_backward",
        "deallocate_output_tensor",
        "forward_step",
        "forward_step_calc_loss",
        "get_pp_rank_microbatches",
        "set_current_microbatch",
    ),
    "ppctl.megatron.wgrad": ("clear_embedding_activation_buffer", "finish_embedding_wgrad_compute"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:
    """A public name, imported from its module."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ppctl' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    """The public names, without loading them."""
    return [*globals(), *_HOME_OF]
