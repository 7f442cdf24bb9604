"""Every field of parallel and pipeline has an honest state, and what is not honoured is refused by name."""

import pytest

from ppctl.config.compose import compose
from ppctl.config.keys import keys, text_keys
from ppctl.config.support import (
    IGNORED,
    LATER,
    MEANING,
    NEEDS,
    PLANS,
    PYTHON,
    SUPPORT,
    WORKS,
    schedule_policy,
)
from ppctl.errors import ConfigError

CODES = {LATER: "PP-E110", NEEDS: "PP-E111", IGNORED: "PP-E112"}
OTHER = {bool: lambda default: not default, int: lambda default: default + 2, str: lambda default: default + "x"}
SPECIAL = {
    "model.num_moe_experts": 8,
    "model.mtp_num_layers": 1,
    "model.rotary_scaling_factor": 40,
    "parallel.hierarchical_context_parallel_sizes": "[2,4]",
    "parallel.autocast_dtype": "bfloat16",
    "parallel.num_microbatches_with_partial_activation_checkpoints": 1,
    "parallel.pipeline_model_parallel_comm_backend": "nccl",
    "parallel.expert_tensor_parallel_size": 2,
    "pipeline.pp_schedule_csv": "x.csv",
    "pipeline.layers_per_stage": 2,
    "pipeline.round_virtual_stages_to_pp_multiple": "up",
    "pipeline.module_fqns_per_model_part": "[[a],[b]]",
    "pipeline.dtype": "bfloat16",
    "pipeline.pp_seq_len": 64,
    "launch.target": "slurm",
    "parallel.overlap_p2p_comm": False,
    "parallel.batch_p2p_comm": True,
    "parallel.batch_p2p_sync": True,
}


def test_every_field_of_parallel_and_pipeline_has_a_state():
    fields = {name for name in keys() if name.partition(".")[0] in ("parallel", "pipeline")}
    assert fields <= set(SUPPORT)
    assert set(SUPPORT) <= set(keys())
    assert {state.state for state in SUPPORT.values()} == set(MEANING)


REFUSED = sorted(name for name, support in SUPPORT.items() if support.state in CODES)


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_is_not_honoured_is_refused_by_name_and_its_remedy_is_accepted(name):
    key = text_keys()[name]
    other = SPECIAL[name] if name in SPECIAL else OTHER[type(key.default)](key.default)
    typed = f"{name}={str(other).lower() if isinstance(other, bool) else other}"
    with pytest.raises(ConfigError) as error:
        compose([typed])
    mine = [problem for problem in error.value.problems if problem.code == CODES[SUPPORT[name].state]]
    assert [problem.message.partition("=")[0] for problem in mine] == [name]
    assert "command line" in mine[0].place
    compose([mine[0].remedy])


@pytest.mark.parametrize("name", sorted(name for name, s in SUPPORT.items() if s.state in CODES and not s.accepts))
def test_typing_the_default_of_such_a_setting_is_fine(name):
    default = text_keys()[name].default
    compose([f"{name}={'null' if default is None else str(default).lower()}"])


@pytest.mark.parametrize("name", sorted(name for name, support in SUPPORT.items() if support.state == PLANS))
def test_what_can_be_planned_is_refused_for_training_only(name):
    key = text_keys()[name]
    other = SPECIAL[name] if name in SPECIAL else OTHER[type(key.default)](key.default)
    typed = f"{name}={str(other).lower() if isinstance(other, bool) else other}"
    compose([typed])
    with pytest.raises(ConfigError) as error:
        compose([typed], for_training=True)
    (problem,) = error.value.problems
    assert problem.code == "PP-E118"
    assert name in problem.message


@pytest.mark.parametrize("name", sorted(name for name, support in SUPPORT.items() if support.state == PYTHON))
def test_a_python_object_cannot_be_typed(name):
    with pytest.raises(ConfigError) as error:
        compose([f"{name}=3"])
    assert [problem.code for problem in error.value.problems] == ["PP-E113"]


def test_a_python_object_left_in_a_config_is_no_problem_of_text():
    assert all(SUPPORT[name].state == PYTHON for name in keys() if name not in text_keys())


@pytest.mark.parametrize(
    ("name", "policy"),
    [
        ("1f1b", "1f1b"),
        ("1F1B", "1f1b"),
        ("Schedule1F1B", "1f1b"),
        ("interleaved1f1b", "interleaved_1f1b"),
        ("Interleaved1F1B", "interleaved_1f1b"),
        ("ScheduleInterleaved1F1B", "interleaved_1f1b"),
        ("interleaved_1f1b", "interleaved_1f1b"),
        ("GPipe", "gpipe"),
        ("ScheduleGPipe", "gpipe"),
        ("zbv", None),
        (None, None),
    ],
)
def test_torchs_names_of_schedules_are_understood(name, policy):
    assert schedule_policy(name) == policy


@pytest.mark.parametrize(
    "name", ["LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ScheduleZBVZeroBubble"]
)
def test_torchs_other_schedules_come_later(name):
    with pytest.raises(ConfigError, match="later release") as error:
        compose([f"pipeline.pp_schedule={name}"])
    assert [problem.code for problem in error.value.problems] == ["PP-E110"]


def test_what_works_is_what_this_release_promises():
    works = {name for name in SUPPORT if SUPPORT[name].state == WORKS}
    assert works == {
        "parallel.pipeline_model_parallel_size", "parallel.virtual_pipeline_model_parallel_size",
        "parallel.pipeline_model_parallel_layout", "parallel.data_parallel_size", "parallel.bf16",
        "parallel.microbatch_group_size_per_vp_stage", "parallel.params_dtype", "parallel.pipeline_dtype",
        "parallel.deallocate_pipeline_outputs", "pipeline.pp_schedule", "pipeline.pp_microbatch_size",
        "pipeline.p2p_capacity", "pipeline.extra_warmup",
    }  # fmt: skip
