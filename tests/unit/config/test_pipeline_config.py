"""PipelineConfig and its arithmetic against the seed and the recorded originals."""

import dataclasses
import json
from pathlib import Path

import pytest

from ppctl.config.pipeline_config import PipelineConfig, calculate_virtual_stages, stage_ids_this_rank
from ppctl.errors import ConfigError
from ppctl.schedule.action import Action
from ppctl.schedule.policies import schedule_policy

RECORDS = json.loads((Path(__file__).parents[2] / "golden" / "nemo.json").read_text())["records"]
FUNCTIONS = {"calculate_virtual_stages": calculate_virtual_stages, "stage_ids_this_rank": stage_ids_this_rank}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_record_of_the_original_holds(name):
    records = [r for r in RECORDS if r["fn"] == name]
    assert records
    for record in records:
        if record["ok"]:
            result = FUNCTIONS[name](**record["args"])
            assert (list(result) if result is not None else None) == record["result"], record
        else:
            with pytest.raises(ValueError) as error:
                FUNCTIONS[name](**record["args"])
            assert isinstance(error.value, ConfigError), record


POLICIES = {
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved_1f1b",
    "GPipe": "gpipe",
    "LoopedBFS": "gpipe",
    "ZBVZeroBubble": "zbv_zero_bubble",
    "DualPipeV": "dualpipev",
    "PipelineScheduleMulti": None,
    "InterleavedZeroBubble": "interleaved_zero_bubble",
    "PipelineScheduleSingle": None,  # torch's class of kinds of schedules: it names none
    "looped_bfs": "gpipe",  # documented by NeMo; torch does not know it
}


def test_what_torch_was_asked_for_nemo_is_answered_by_name():
    """The rest of the records: three names of schedules, two cells of a CSV. test_plan_split.py has the last one."""
    names = [r for r in RECORDS if r["fn"].startswith("torch.get_schedule_class")]
    cells = [r for r in RECORDS if r["fn"].startswith("torch _Action.from_str")]
    for name in (record["args"]["schedule_name"] for record in names):
        assert schedule_policy(name) == POLICIES[name], name
    for record in cells:
        action = Action.parse(record["args"]["cell"])
        told = {"stage": action.stage, "type": str(action.op), "microbatch": action.mb, "repr": str(action)}
        assert told == record["result"]
    others = {r["fn"] for r in RECORDS if r["fn"] not in FUNCTIONS and r not in names + cells}
    assert others <= {"generate_hf_model_fqn_per_model_part"}


def test_a_stage_of_no_layers_is_an_error_and_not_a_division_by_zero():
    with pytest.raises(ConfigError, match="at least one layer"):
        calculate_virtual_stages(8, 0, 2, is_single_stage_schedule=True)


def test_a_v_with_three_stages_per_rank_is_refused():
    with pytest.raises(ConfigError, match="2 stages per rank"):
        stage_ids_this_rank(0, 2, 6, "v")


def test_defaults_are_the_documented_ones_and_to_dict_holds_them_all():
    assert PipelineConfig().to_dict() == {
        "pp_schedule": "1f1b",
        "pp_schedule_csv": None,
        "pp_microbatch_size": 1,
        "pp_batch_size": 1,
        "layers_per_stage": None,
        "round_virtual_stages_to_pp_multiple": None,
        "module_fqns_per_model_part": None,
        "patch_inner_model": True,
        "patch_causal_lm_model": True,
        "patch_stage_backward_maybe_with_nosync": False,
        "dtype": None,
        "scale_grads_in_schedule": False,
        "loss_fn": None,
        "pp_seq_len": None,
    }
    assert [f.name for f in dataclasses.fields(PipelineConfig)] == list(PipelineConfig().to_dict())
