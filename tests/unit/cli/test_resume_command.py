"""`ppctl resume` before anything starts: what may change, what may not, and what becomes of the directory."""

import json
import shlex
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
from checkpoint_states import write

from ppctl.cli import main as front
from ppctl.cli import resume, train
from ppctl.cli.main import main
from ppctl.errors import CheckpointError, ConfigError
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import Launch, go_on, new_run, with_value
from ppctl.runs import fence
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir

PERSON = Started("person")
EXPERTS = {"num_moe_experts": 4, "moe_ffn_hidden_size": 64}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that was stopped after step 4 of 20, its sizes given on the command line."""
    monkeypatch.chdir(tmp_path)
    typed = ["+recipe=quickstart", "launch.device=cpu", "pp=4", "vpp=1", "steps=20"]
    made = new_run(train.prepare(front.parse("train", train, typed), PERSON), PERSON)
    (made.checkpoints / "step-4").mkdir()
    (made.checkpoints / "latest").write_text("step-4\n")
    for step in range(6):
        made.add_metrics({"step": step})
    made.write_status("stopped", step=4)
    return made


def arguments(*typed: str) -> Namespace:
    return front.parse("resume", resume, list(typed))


def prepared(run: RunDir, *typed: str) -> tuple[Launch, Path]:
    return resume.prepare(arguments(*typed), run, PERSON)


@pytest.mark.parametrize(
    ("typed", "sizes"),
    [
        ([], (4, 1, 1)),
        (["pp=2", "vpp=2"], (2, 2, 1)),
        (["pp=1"], (1, 1, 1)),
        (["pp=2", "layout=Ettt|tttttL"], (2, 1, 1)),
        (["nodes=1", "gpus_per_node=8"], (4, 1, 2)),
    ],
)
def test_a_run_goes_on_in_another_cut(run: RunDir, typed: list[str], sizes: tuple[int, int, int]) -> None:
    launch, checkpoint = prepared(run, *typed)
    assert (launch.plan.sizes.pp, launch.plan.sizes.vpp, launch.plan.sizes.dp) == sizes
    assert checkpoint == run.checkpoints / "step-4"
    before = run.read_config()
    assert (launch.config.model, launch.config.train, launch.config.data) == (before.model, before.train, before.data)


@pytest.mark.parametrize(
    "typed",
    [
        "model.hidden_size=512",
        "gbs=32",
        "seq=128",
        "train.seed=1",
        "lr=3e-3",
        "data.path=*.txt",
        "parallel.bf16=true",
        "pipeline.scale_grads_in_schedule=true",
    ],
)
def test_what_changes_the_mathematics_is_refused_unless_allowed(run: RunDir, typed: str) -> None:
    Path("a.txt").write_text("some text " * 100)
    with pytest.raises(ConfigError, match="PP-E617") as caught:
        prepared(run, typed)
    words = shlex.split(caught.value.problems[0].remedy)
    launch, _ = prepared(run, *words[words.index("resume") + 1 :])
    assert launch.config != run.read_config()


@pytest.mark.parametrize("typed", ["mbs=1", "pipeline.pp_microbatch_size=1"])
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({}, None),
        ({"pipeline": {"scale_grads_in_schedule": True}}, "every microbatch has the same weight"),
        ({"model": EXPERTS | {"moe_aux_loss_coeff": 0.01}}, "experts are balanced within each microbatch"),
        ({"model": {"moe_aux_loss_coeff": 0.01}}, None),
        ({"model": EXPERTS | {"moe_z_loss_coeff": 0.01}}, None),
        ({"model": EXPERTS | {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"}}, None),
        ({"model": EXPERTS | {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "none"}}, None),
    ],
)
def test_another_micro_batch_is_refused_where_the_objective_depends_on_it(
    run: RunDir, changes: dict[str, dict[str, object]], says: str | None, typed: str
) -> None:
    config = run.read_config()
    for section, values in changes.items():
        config = with_value(config, section, **values)
    run.write_config(config)
    assert prepared(run, typed, "--allow")[0].config.train.micro_batch_size == 1
    if says is None:
        assert prepared(run, typed)[0].config.train.micro_batch_size == 1
        return
    with pytest.raises(ConfigError, match=f"PP-E617: train.micro_batch_size was 2 and would be 1: {says}"):
        prepared(run, typed)


def test_all_that_is_wrong_is_told_at_once(run: RunDir) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(run, "seq=128", "gbs=32", "lr=1e-4")
    assert [problem.code for problem in caught.value.problems] == ["PP-E103", *["PP-E617"] * 3]


def test_the_differences_are_shown(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    prepared(run, "pp=2", "steps=30")
    err = capsys.readouterr().err
    assert "  parallel.pipeline_model_parallel_size: 4 -> 2\n" in err
    assert "  train.steps: 20 -> 30\n" in err
    assert err.count("->") == 2


def test_the_directory_goes_on_and_keeps_what_was(run: RunDir) -> None:
    old, records = (run.path / "plan.json").read_text(), run.metrics()
    launch, checkpoint = prepared(run, "pp=2", "vpp=2")
    before = fence.newest(run.path)  # of an agent that has begun nothing yet
    go_on(run, launch, checkpoint)
    assert fence.older(before) is not None
    assert (run.path / "plan-1.json").read_text() == old
    assert run.read_plan().sizes.pp == 2
    assert run.read_config().checkpoint.resume == str(run.checkpoints / "step-4")
    assert run.metrics() == records, "until the ranks have verified the checkpoint"
    assert len(run.commands()) == 2
    again, _ = prepared(run, "pp=1")
    assert again.plan.sizes.pp == 1, "a later command line is stronger than an earlier one"


def test_an_older_checkpoint_can_be_named(run: RunDir) -> None:
    (run.checkpoints / "step-2").mkdir()
    launch, checkpoint = prepared(run, f"checkpoint.resume={run.checkpoints}/step-2")
    assert checkpoint.name == "step-2"
    assert launch.config.checkpoint.resume == str(checkpoint)


def test_where_latest_names_nothing_that_is_there_the_newest_checkpoint_is_used_with_a_warning(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(run.checkpoints / "step-4", "4")
    (run.checkpoints / "latest").write_text("step-5\n")
    assert prepared(run)[1] == run.checkpoints / "step-4"
    err = capsys.readouterr().err
    latest = run.checkpoints / "latest"
    assert f"warning: {latest} names step-5, which is not there; using step-4, the newest complete" in err
    assert f"going on with {run.path} from step-4" in err


def test_without_a_checkpoint_the_exit_code_is_3_and_the_remedy_starts_anew(
    run: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.checkpoints)
    with pytest.raises(CheckpointError, match="PP-E615") as caught:
        prepared(run)
    words = shlex.split(caught.value.problems[0].remedy)
    train.prepare(front.parse("train", train, words[words.index("train") + 1 :]), PERSON)
    assert main(["resume", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["exit_code"] == 3


@pytest.mark.parametrize(
    ("typed", "code"),
    [
        (["nosuchrun"], "PP-E611"),
        (["recipe=llama3_8b"], "PP-E104"),
        (["model.hiden_size=3"], "PP-E101"),
        (["pp=3", "layout=Et|t"], "PP-E"),
        (["launch.device=cuda"], "PP-E601"),
    ],
)
def test_other_mistakes_are_config_errors(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: list[str], code: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["resume", *typed]) == 2
    assert f"error {code}" in capsys.readouterr().err
    assert run.status()["state"] == "stopped"
    assert not (run.path / "plan-1.json").exists()


def test_without_a_gpu_the_remedy_goes_on_with_the_same_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="PP-E601") as caught:
        prepared(run, "launch.device=cuda")
    words = shlex.split(caught.value.problems[0].remedy)
    assert words[:3] == ["ppctl", "resume", str(run.path)]
    assert prepared(run, *words[3:])[0].config.launch.device == "cpu"


def test_a_run_that_is_done_wants_more_steps(run: RunDir) -> None:
    run.write_status("finished", step=20)
    (run.checkpoints / "step-20").mkdir()
    (run.checkpoints / "latest").write_text("step-20\n")
    with pytest.raises(ConfigError, match=r"PP-E618: run .* has done its 20 steps") as caught:
        prepared(run)
    words = shlex.split(caught.value.problems[0].remedy)
    assert prepared(run, *words[words.index("resume") + 1 :])[0].config.train.steps == 40


def test_fewer_steps_than_are_done_are_refused(run: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"PP-E618: run .* has done its 4 steps, but train.steps is 3") as caught:
        prepared(run, "steps=3")
    words = shlex.split(caught.value.problems[0].remedy)
    assert prepared(run, *words[words.index("resume") + 1 :])[0].config.train.steps == 8
    assert prepared(run, "steps=4")[0].config.train.steps == 4, "its end may be what is missing"


@pytest.mark.parametrize("key", ["log.trace", "log.torch_profile", "log.gradients"])
def test_steps_to_keep_that_are_done_are_refused_with_some_that_are_not(run: RunDir, key: str) -> None:
    with pytest.raises(
        ConfigError, match=f"PP-E648: {key}=4:6 begins with step 4, but the run continues after"
    ) as caught:
        prepared(run, f"{key}=4:6")
    (problem,) = caught.value.problems
    assert problem.remedy == f"{key}=5:7"
    assert getattr(prepared(run, problem.remedy)[0].config.log, key.partition(".")[2]) == "5:7"


@pytest.mark.parametrize("typed", ["log.name=other", "log.dir=elsewhere"])
def test_a_run_stays_where_it_is(run: RunDir, typed: str) -> None:
    with pytest.raises(ConfigError, match="a resumed run keeps its directory"):
        prepared(run, typed, "--allow")


def test_a_run_that_is_going_on_is_left_alone(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    with hold(run):
        assert main(["resume", run.id]) == 2
    assert "PP-E613" in capsys.readouterr().err
    assert not (run.path / "plan-1.json").exists()
