"""Every name of the Megatron-core and NeMo documents can be imported from the top, and costs nothing before that."""

import re
import subprocess
import sys
from importlib import import_module

import pytest

import ppctl

TORCH_FREE = ("LayerType", "PipelineParallelLayerLayout", "ModelParallelConfig", "PipelineConfig")
NAMES = {
    "ppctl.layout": "PipelineParallelLayerLayout LayerType",
    "ppctl.comm.p2p_communication": "P2PCommunicator is_single_shape Shape",
    "ppctl.schedules": "forward_backward_no_pipelining forward_backward_pipelining_without_interleaving "
    "forward_backward_pipelining_with_interleaving get_forward_backward_func forward_step backward_step "
    "forward_step_calc_loss custom_backward deallocate_output_tensor get_schedule_table "
    "convert_schedule_table_to_order get_pp_rank_microbatches get_tensor_shapes set_current_microbatch "
    "check_first_val_step clear_embedding_activation_buffer finish_embedding_wgrad_compute",
    "ppctl.config.model_parallel_config": "ModelParallelConfig",
    "ppctl.config.pipeline_config": "PipelineConfig",
}


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, names in NAMES.items() for name in names.split()])
def test_a_public_name_is_at_the_top(home: str, name: str) -> None:
    assert getattr(ppctl, name) is getattr(import_module(home), name)
    assert name in ppctl.__all__ and name in dir(ppctl)


def test_nothing_is_imported_before_it_is_asked_for() -> None:
    program = f"""
import sys, ppctl
assert not [name for name in sys.modules if name.startswith("ppctl.")]
from ppctl import {", ".join(TORCH_FREE)}
assert "torch" not in sys.modules
from ppctl import *
assert "torch" in sys.modules and P2PCommunicator
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=re.escape("module 'ppctl' has no attribute 'nothing'")):
        _ = ppctl.nothing
