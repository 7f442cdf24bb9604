"""ModelParallelConfig against its seed's fields and the recorded originals."""

import dataclasses
import json
import warnings
from pathlib import Path

import pytest

from ppctl.config.model_parallel_config import ModelParallelConfig, ModelParallelConfigError, dtype_name, problems
from ppctl.config.schema import ParallelConfig
from ppctl.errors import ConfigError

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "config.json").read_text())
RECORDS = [r for r in GOLDEN["records"] if r["fn"] == "ModelParallelConfig"]
FIELDS = next(r for r in GOLDEN["records"] if r["fn"].startswith("fields"))["result"]

NOT_IN_THE_SEED = {  # fields of a newer Megatron than the documented one
    "tensor_parallel_num_weight_shards",
    "gtp_weight_remat_size",
    "max_seqlen_per_dp_cp_rank",
    "hybrid_context_parallel",
    "expert_tensor_parallel_num_weight_shards",
    "expert_gtp_weight_remat_size",
    "moe_grad_scale_func",
    "mtp_grad_scale_func",
    "overlap_dispatch_backward_with_experts_wgrad",
    "ep_overlap_early_attn_memory_release",
    "mtp_standalone",
    "cpu_offloading_retain_pinned_cpu_buffers",
}
DIFFERENT_DEFAULT = {"params_dtype"}  # the seed documents none, the newer original float32

AUTOCAST_FOLLOWS_THE_MESSAGES = {  # documented: autocast_dtype takes pipeline_dtype; the original takes params_dtype
    "params_dtype": "torch.bfloat16",
    "pipeline_dtype": "torch.float16",
    "pipeline_model_parallel_size": 2,
}


def _id(record):
    return ",".join(f"{k}={v}" for k, v in record["args"].items()) or "defaults"


@pytest.mark.parametrize("record", RECORDS, ids=_id)
def test_every_recorded_construction_ends_the_same(record):
    if set(record["args"]) & (NOT_IN_THE_SEED | {"no_such_field"}):
        with pytest.raises(TypeError):
            ModelParallelConfig(**record["args"])
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not record["ok"]:
            with pytest.raises(ValueError) as error:
                ModelParallelConfig(**record["args"])
            assert isinstance(error.value, ConfigError)
            return
        config = ModelParallelConfig(**record["args"])
    expected = {k: v for k, v in record["result"].items() if k not in NOT_IN_THE_SEED}
    if record["args"] == AUTOCAST_FOLLOWS_THE_MESSAGES:
        expected["autocast_dtype"] = "torch.float16"
    got = {k: getattr(config, k) for k in expected}
    got["autocast_dtype"] = f"torch.{dtype_name(got['autocast_dtype'])}"
    assert got == expected
    assert len(caught) == len(record["warnings"])


def test_fields_and_defaults_are_the_documented_ones():
    ours = {f.name: f.default for f in dataclasses.fields(ModelParallelConfig)}
    assert set(FIELDS) - set(ours) == NOT_IN_THE_SEED
    assert set(ours) - set(FIELDS) == {"moe_extended_tp", "async_tensor_model_parallel_allreduce"}
    differing = {
        name
        for name, field in FIELDS.items()
        if name in ours and str(ours[name]) != (field["default"] if field["default"] is not None else "None")
    }
    assert differing == DIFFERENT_DEFAULT


def test_all_broken_rules_are_told_at_once():
    with pytest.raises(ModelParallelConfigError) as error:
        ModelParallelConfig(sequence_parallel=True, pipeline_model_parallel_size=2, overlap_p2p_comm_warmup_flush=True)
    text = str(error.value)
    assert len(error.value.problems) == 3
    assert all(name in text for name in ("sequence_parallel", "pipeline_dtype", "overlap_p2p_comm_warmup_flush"))


def test_the_runs_own_parallel_section_neither_raises_nor_fills_in():
    broken = ParallelConfig(pipeline_model_parallel_size=2, sequence_parallel=True)
    assert len(problems(broken)) == 2
    assert broken.expert_tensor_parallel_size is None
    assert broken.microbatch_group_size_per_vp_stage is None
    assert broken.autocast_dtype is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (None, None),
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        ("FP32", "float32"),
        ("float16", "float16"),
        ("half", "float16"),
        ("torch.float64", "float64"),
    ],
)
def test_a_dtype_has_one_name(value, name):
    assert dtype_name(value) == name


@pytest.mark.parametrize("value", ["int8", "", "torch", 32])
def test_what_is_no_dtype_is_refused_with_the_names(value):
    with pytest.raises(ValueError, match="float32, bfloat16, float16"):
        dtype_name(value)
