"""Pipeline-parallel training of language models from one config.

The names that users of Megatron-core and NeMo know are here, and each is imported when it is first asked for: `import
ppctl` costs nothing, and the torch-free ones need no torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "ppctl.layout": ("LayerType", "PipelineParallelLayerLayout"),
    "ppctl.comm.p2p_communication": ("P2PCommunicator", "Shape", "is_single_shape"),
    "ppctl.schedules": (
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
        "set_current_microbatch",
    ),
    "ppctl.config.model_parallel_config": ("ModelParallelConfig",),
    "ppctl.config.pipeline_config": ("PipelineConfig",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
