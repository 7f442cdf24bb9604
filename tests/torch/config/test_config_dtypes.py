"""A dtype field takes a torch.dtype as well as its name."""

import pytest
import torch

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.model_parallel_config import ModelParallelConfig, dtype_name
from ppctl.config.schema import RunConfig


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_a_dtype_and_its_name_are_the_same_setting(name):
    dtype = getattr(torch, name)
    assert dtype_name(dtype) == name
    config = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=dtype)
    assert config.pipeline_dtype is dtype
    assert config.autocast_dtype is dtype


def test_a_dtype_is_written_by_its_name():
    config = RunConfig()
    config.parallel.params_dtype = torch.bfloat16
    assert from_mapping(to_mapping(config)).parallel.params_dtype == "bfloat16"


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_a_dtype_that_no_model_has_is_refused(dtype):
    with pytest.raises(ValueError, match="no dtype of a model"):
        dtype_name(dtype)
