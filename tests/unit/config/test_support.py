"""Every field of parallel and pipeline has an honest state, and what is not honoured is refused by name."""

import ast
import re
from pathlib import Path

import pytest

from ppctl.config.compose import compose
from ppctl.config.keys import keys, text_keys
from ppctl.config.metadata import IGNORED, LATER, MEANING, NEEDS, PYTHON, WORKS
from ppctl.errors import ConfigError
from ppctl.schedule.policies import schedule_policy

CODES = {LATER: "PP-E110", NEEDS: "PP-E111"}
ROOT = Path(__file__).parents[3]
OTHER = {bool: lambda default: not default, int: lambda default: default + 2, str: lambda default: default + "x"}
SPECIAL = {
    "model.normalization": "LayerNorm",
    "model.position_embedding_type": "learned_absolute",
    "model.attention_dropout": 0.1,
    "model.hidden_dropout": 0.1,
    "model.num_moe_experts": 8,
    "model.mtp_num_layers": 1,
    "model.cp_comm_type": "[a2a]",
    "parallel.hierarchical_context_parallel_sizes": "[2,4]",
    "parallel.autocast_dtype": "bfloat16",
    "parallel.num_microbatches_with_partial_activation_checkpoints": 1,
    "parallel.expert_tensor_parallel_size": 2,
    "parallel.cross_entropy_fusion_impl": "te",
}


STATES = {name: key.facts.support.state for name, key in keys().items()}


def with_state(*states):
    return sorted(name for name, state in STATES.items() if state in states)


def shown():
    """Key -> the tests that are marked to show that it works: `@pytest.mark.shows("parallel.order")`."""
    tests = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for test in ast.parse(path.read_text()).body if "mark.shows" in path.read_text() else ():
            for mark in getattr(test, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.shows("):
                    for name in mark.args:
                        tests.setdefault(ast.literal_eval(name), []).append(f"{path.relative_to(ROOT)}::{test.name}")
    return tests


def test_every_field_of_parallel_and_pipeline_that_works_is_shown_by_a_test():
    works = with_state(WORKS, PYTHON)
    assert {name for name in works if name.partition(".")[0] in ("parallel", "pipeline")} <= set(shown()) <= set(works)
    assert set(STATES.values()) == set(MEANING)


@pytest.mark.parametrize("name", with_state(*CODES))
def test_a_setting_that_is_not_honoured_is_refused_by_name_and_its_remedy_is_accepted(name):
    key = text_keys()[name]
    other = SPECIAL[name] if name in SPECIAL else OTHER[type(key.default)](key.default)
    typed = f"{name}={str(other).lower() if isinstance(other, bool) else other}"
    with pytest.raises(ConfigError) as error:
        compose([typed])
    mine = [problem for problem in error.value.problems if problem.code == CODES[STATES[name]]]
    assert [problem.message.partition("=")[0] for problem in mine] == [name]
    assert "command line" in mine[0].place
    compose([mine[0].remedy])


@pytest.mark.parametrize("name", with_state(*CODES))
def test_typing_the_default_of_such_a_setting_is_fine(name):
    default = text_keys()[name].default
    compose([f"{name}={'null' if default is None else str(default).lower()}"])


@pytest.mark.parametrize("name", with_state(PYTHON))
def test_a_python_object_cannot_be_typed(name):
    with pytest.raises(ConfigError) as error:
        compose([f"{name}=3"])
    assert [problem.code for problem in error.value.problems] == ["PP-E113"]


def test_a_python_object_left_in_a_config_is_no_problem_of_text():
    states = {name: STATES[name] for name in keys() if name not in text_keys()}
    assert {name for name, state in states.items() if state != PYTHON} == {"parallel._cpu_offloading_context"}


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
        ("zbv", "zbv_zero_bubble"),
        ("zb_v", None),
        (None, None),
    ],
)
def test_torchs_names_of_schedules_are_understood(name, policy):
    assert schedule_policy(name) == policy


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS"])
@pytest.mark.parametrize("spelt", [str, str.lower, str.upper, "Schedule{}".format])
def test_torchs_names_of_schedules_are_taken_in_any_case(name, spelt):
    compose([f"pipeline.pp_schedule={spelt(name)}", "pp=2"], for_training=True)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs", "dfs"])
def test_nemos_names_of_schedules_are_taken(name):
    compose([f"pipeline.pp_schedule={name}", "pp=2"], for_training=True)


@pytest.mark.parametrize(
    "name",
    ["InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "ScheduleZBVZeroBubble", "v_schedule", "zero_bubble"],
)
def test_schedules_with_split_backwards_are_trained(name):
    compose([f"pipeline.pp_schedule={name}", "pp=2"], for_training=True)


def test_experts_in_8_bits_but_by_rows_are_refused_where_the_device_is_known_to_be_a_gpu():
    on_gpus = ["+recipe=mixtral_8x7b", "model.fp8=hybrid"]  # the recipe's device is cuda
    compose([*on_gpus, "launch.device=cpu"], for_training=True)
    compose(on_gpus)
    compose([on_gpus[0], "model.fp8=e4m3"], for_training=True)
    for typed in (on_gpus, [on_gpus[0], "model.fp8=e4m3", "model.fp8_recipe=blockwise"]):
        with pytest.raises(ConfigError, match=r"other than rowwise in e4m3 \(model.fp8=") as error:
            compose(typed, for_training=True)
        assert [problem.code for problem in error.value.problems] == ["PP-E118"]


@pytest.mark.parametrize("name", ["PipelineScheduleSingle", "pipelineschedulemulti"])
def test_a_kind_of_schedule_is_no_schedule(name):
    with pytest.raises(ConfigError, match="a kind of schedule"):
        compose([f"pipeline.pp_schedule={name}"])


def test_every_state_begins_with_one_of_four_words():
    words = {re.split(r"\W", text)[0] for text in MEANING.values()}
    assert words == {"works", "later", "needs", "ignored"}


@pytest.mark.parametrize("name", [name for name in with_state(IGNORED) if name in text_keys()])
def test_what_the_original_ignores_is_accepted_with_one_note(name):
    assert compose([]).notes == ()
    (note,) = compose([f"{name}={str(not text_keys()[name].default).lower()}"]).notes
    assert name in note
    assert "command line" in note
