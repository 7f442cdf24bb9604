"""`ppctl train` before anything starts: refusals, the run directory, and the commands that it proposes."""

import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from ppctl.cli import local_run, train
from ppctl.cli import main as front
from ppctl.cli.main import main
from ppctl.config.argv import retyped
from ppctl.errors import ConfigError
from ppctl.launch.environment import Started
from ppctl.launch.outcome import JobOutcome
from ppctl.launch.planning import planned
from ppctl.launch.run_directory import Launch, go_on, interrupted, new_run, with_value
from ppctl.runs.finding import last_checkpoint, list_runs
from ppctl.runs.rundir import RunDir

QUICK = ["recipe=quickstart", "launch.device=cpu"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(("SLURM_", "TORCHELASTIC_", "MASTER_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


def arguments(*typed: str, command: str = "train") -> Namespace:
    module = __import__(f"ppctl.cli.{command}", fromlist=["run"])
    return front.parse(command, module, list(typed))


def prepared(*typed: str) -> Launch:
    return train.prepare(arguments(*typed), Started("person"))


@pytest.mark.parametrize(
    ("typed", "code", "says"),
    [
        (["+recipe=llama3_8b"], 2, ["PP-E601: needs 32 GPUs, this machine has 0", "ppctl plan +recipe=llama3_8b"]),
        (["+recipe=deepseek_v3"], 2, ["PP-E601: needs 2,048 GPUs"]),
        (["+recipe=quickstrat", "model.hiden_size=3"], 2, ["did you mean quickstart", "hidden_size"]),
        (["+recipe=quickstart", "pp=3", "gbs=7"], 2, ["PP-E2"]),
        (["+recipe=quickstart", "launch.device_memory=1MiB"], 4, ["PP-E801"]),
        (["+recipe=quickstart", "checkpoint.resume=nowhere"], 3, ["PP-E615: checkpoint.resume=nowhere"]),
        (["model.from=org/name"], 2, ["hf download org/name --local-dir name", "model.from=name"]),
        (["model.lora_rank=8"], 2, ["no key model.lora_rank: model.lora trains adapters", "try: model.lora.rank=16"]),
        (["train.profile=true"], 2, ["no key train.profile; did you mean log.torch_profile?"]),
        (["+recipe=quickstart", "launch.target=env"], 2, ["launch.target"]),
        (["+recipe=quickstart", "launch=slurm"], 2, ["PP-E629: launch.target=slurm takes effect", "ppctl submit +rec"]),
        (["+recipe=quickstart", "launch.qos=a", "launch.time=9"], 2, ["launch.qos, launch.time take effect"]),
        (
            ["+recipe=quickstart", "pp_schedule=auto", "pipeline.schedule_memory=60"],
            2,
            ["try: pipeline.schedule_memory=60GiB"],
        ),
        (["+recipe=quickstart", "-m"], 2, ["PP-E106"]),
        (["+recipe=quickstart", "--frobnicate"], 2, ["frobnicate"]),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_written(
    here: Path, capsys: pytest.CaptureFixture[str], typed: list[str], code: int, says: list[str]
) -> None:
    assert main(["train", *typed]) == code
    out, err = capsys.readouterr()
    assert out == ""
    for text in says:
        assert text in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("typed", ["launch.max_restarts=-5", "launch.time=soon", "launch.kubernetes.image=a b"])
def test_a_value_that_is_refused_stands_in_no_remedy(
    here: Path, capsys: pytest.CaptureFixture[str], typed: str
) -> None:
    assert main(["train", "+recipe=quickstart", typed]) == 2
    said = capsys.readouterr().err
    assert (
        "error PP-E103" in said and "PP-E629" not in said and typed.partition("=")[2] not in said.partition("try:")[2]
    )


@pytest.mark.parametrize(
    ("typed", "code", "says"),
    [
        (["+recipe=quickstart"], 2, ["PP-E629: launch.device=any depends on the machine's GPUs", "launch.device=cpu"]),
        (["+recipe=quickstart", "launch.device=cpu"], 2, ["PP-E620: there is no sbatch here", "--dry-run"]),
        (["+recipe=llama3_8b", "nodes=5"], 2, ["PP-E211"]),
        (["+recipe=quickstart", "launch.device=cpu", "launch.parttion=a"], 2, ["did you mean launch.partition"]),
        (["+recipe=quickstart", "launch.device=cpu", "launch.after=nobody"], 2, ["PP-E611"]),
        (["+recipe=quickstart", "launch.device=cpu", "checkpoint.resume=nowhere"], 3, ["PP-E615"]),
        (["+recipe=quickstart", "launch.device=cpu", "launch.device_memory=1MiB"], 4, ["PP-E801"]),
    ],
)
def test_what_cannot_be_submitted_is_refused_before_anything_is_written(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], typed: list[str], code: int,
    says: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["submit", *typed]) == code
    out, err = capsys.readouterr()
    assert out == ""
    for text in says:
        assert text in err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", ["cancel", "requeue"])
def test_a_run_that_was_not_submitted_has_no_job(here: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    new_run(prepared("+recipe=quickstart", "launch.device=cpu"), Started("person"))
    assert main([command]) == 2
    assert "PP-E628" in capsys.readouterr().err
    assert main(["status"]) == 0
    assert "starting, step 0" in capsys.readouterr().out
    assert main(["logs"]) == 0
    assert "has done no step" in capsys.readouterr().err
    assert main(["logs", "--rank", "0"]) == 2


def test_with_json_a_refusal_is_one_object_on_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "+recipe=llama3_8b", "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (told["state"], told["exit_code"]) == ("refused", 2)
    assert [problem["code"] for problem in told["problems"]] == ["PP-E601"]
    assert err.startswith("error PP-E601")


def test_the_remedies_of_too_few_gpus_work(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "+recipe=quickstart", "launch.device=cuda", "--json"])
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    remedies = problem["remedy"].splitlines()
    assert [remedy.split()[1] for remedy in remedies] == ["plan", "train", "train"]
    assert main(shlex.split(remedies[0])[1:]) == 0
    for remedy in remedies[1:]:
        assert prepared(*shlex.split(remedy)[2:]).config.launch.device == "cpu"


@pytest.mark.parametrize(("sizes", "refused"), [((), True), (("pp=1", "vpp=1"), False)])
def test_receives_posted_ahead_and_a_single_queue_on_the_gpu_are_refused(capsys, monkeypatch, sizes, refused) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    asked = ["train", "+recipe=quickstart", "launch.device=cuda", *sizes]
    assert main([*asked, "launch.transport=channels"]) == 2  # there is no GPU either
    assert ("error PP-E608: " in capsys.readouterr().err) == refused
    assert main(asked) == 2
    err = " ".join(capsys.readouterr().err.split())
    assert "PP-E608" not in err
    assert err.count("CUDA_DEVICE_MAX_CONNECTIONS=1 is kept: plain messages are not received ahead") == refused
    assert prepared(*QUICK).config.launch.device == "cpu"


def test_where_any_device_turns_out_to_be_a_gpu_the_run_is_planned_with_plain_messages(monkeypatch) -> None:
    monkeypatch.setattr(local_run, "choose_device", lambda *_, **__: "cuda")
    monkeypatch.setattr(local_run, "shortage", lambda *_, **__: [])

    def adapted(*words: str) -> tuple[Any, Any, Any]:
        composed, plan, problems = planned([*QUICK, "launch.device=any", *words], for_training=True)
        assert plan is not None and not problems and not plan.schedule.batched
        return local_run.adapt_to_machine(composed.config, plan, QUICK, Started("person"))

    config, plan, _ = adapted()
    assert config.launch.device == "cuda" and plan.schedule.batched
    _, plan, _ = adapted("launch.transport=channels")
    assert not plan.schedule.batched
    with pytest.raises(ConfigError, match="a capacity has no effect"):
        adapted("pipeline.p2p_capacity=4")


def test_the_control_tower_starts_a_run_without_torch(tmp_path: Path) -> None:
    program = (
        "import sys; from ppctl.cli import train, resume, runs\n"
        "from ppctl.cli import main as front\n"
        "from ppctl.launch.environment import Started; from ppctl.launch.run_directory import new_run\n"
        "args = front.parse('train', train, ['+recipe=quickstart'])\n"
        "new_run(train.prepare(args, Started('person')), Started('person'))\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=tmp_path).returncode == 0


def test_a_new_run_directory_holds_what_ranks_need(here: Path) -> None:
    launch = prepared("+recipe=quickstart", "layout=Ett|tt|tt|ttL", "steps=7")
    run = new_run(launch, Started("person"))
    assert run.path.parent == here / "runs" / "quickstart"
    assert run.read_config() == launch.config
    assert run.read_config().launch.device == "cpu", "any has been settled"
    assert run.read_plan().digest == launch.plan.digest
    assert (run.path / "schedule.csv").read_text() == launch.plan.schedule.to_csv()
    assert run.environment()["device"] == "cpu"
    assert run.status()["state"] == "starting"


def test_the_command_in_command_txt_plans_the_same_run() -> None:
    launch = prepared(
        "+recipe=quickstart", "--pipeline-model-parallel-layout", "Ett|tt|tt|ttL", "log.name=a b", "lr=1e-3"
    )
    run = new_run(launch, Started("person"))
    (line,) = run.commands()
    words = shlex.split(line)
    again = prepared(*words[words.index("train") + 1 :])
    assert again.config == launch.config
    assert again.plan.digest == launch.plan.digest


@pytest.mark.parametrize(("by", "world"), [("torchrun", 4), ("slurm", 3), ("env", 1)])
def test_another_number_of_ranks_than_the_plans_is_refused_with_both(by: str, world: int) -> None:
    with pytest.raises(front.ConfigError) as caught:
        train.prepare(arguments(*QUICK), Started(by, 0, world))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E603"
    assert "for 2 ranks" in problem.message and f"started {world}" in problem.message
    for remedy in problem.remedy.splitlines():
        words = shlex.split(remedy)
        if "train" in words:
            assert prepared(*words[words.index("train") + 1 :]).plan.sizes.world == 2
        if "plan" in words:
            assert prepared(*words[words.index("plan") + 1 :]).plan.sizes.world == world


def test_a_job_that_its_starter_starts_again_goes_on_in_its_directory() -> None:
    first = Started("slurm", 0, 2, "4711.0", 0)
    run = new_run(train.prepare(arguments(*QUICK), first), first)
    (run.checkpoints / "step-4").mkdir()
    (run.checkpoints / "latest").write_text("step-4\n")
    for step in range(6):
        run.add_metrics({"step": step})
    again = Started("slurm", 0, 2, "4711.0", 1)
    launch = train.prepare(arguments(*QUICK), again)
    assert interrupted(launch, first) is None and interrupted(launch, again) == run
    second = go_on(run, launch, last_checkpoint(run))
    assert second.read_config().checkpoint.resume == str(run.checkpoints / "step-4")
    # The steps behind the checkpoint will be done again; their records go once the ranks have verified it.
    assert [record["step"] for record in second.metrics()] == [0, 1, 2, 3, 4, 5]
    assert len(second.commands()) == 2
    assert len(list_runs(Path("runs"))) == 1


@pytest.mark.parametrize("form", ["{run}", "{run}/checkpoints", "{run}/checkpoints/step-4", "{id}"])
def test_a_checkpoint_is_named_by_itself_or_by_its_run(form: str) -> None:
    run = new_run(prepared(*QUICK), Started("person"))
    (run.checkpoints / "step-4").mkdir()
    (run.checkpoints / "latest").write_text("step-4\n")
    launch = prepared(*QUICK, f"checkpoint.resume={form.format(run=run.path, id=run.id)}")
    assert launch.config.checkpoint.resume == str(run.checkpoints / "step-4")


@pytest.mark.parametrize("typed", [QUICK, [*QUICK, "pp=4", "vpp=1"], [*QUICK, "layout=Ett|tt|tt|ttL", "steps=9"]])
def test_the_next_commands_work(typed: list[str]) -> None:
    launch = prepared(*typed)
    run = new_run(launch, Started("person"))
    (run.checkpoints / "step-9").mkdir()
    (run.checkpoints / "latest").write_text("step-9\n")
    run.write_result({"sample": {"prompt": "def", "text": "a\tb\x00\n  c"}})
    lines = local_run.ending(run, launch, JobOutcome(0, "finished"))
    told = lines[: lines.index("next:")]
    assert "  def" in told and "  a·b·\n    c" in told
    commands = [shlex.split(line) for line in lines[lines.index("next:") + 1 :]]
    plan, resume = (words[words.index(name) :] for words, name in zip(commands, ("plan", "resume"), strict=True))
    assert main(plan) == 0
    assert last_checkpoint(RunDir(Path(resume[1]).absolute())) is not None


def test_a_run_without_a_recipe_names_none_of_other_peoples_models() -> None:
    typed = ["model.num_layers=4", "pp=2", "steps=2", "launch.device=cpu"]
    launch = prepared(*typed)
    lines = local_run.ending(new_run(launch, Started("person")), launch, JobOutcome(0, "finished"))
    assert not any("+recipe=" in line for line in lines) and lines[-1].endswith("steps=4")


@pytest.mark.parametrize(("where", "wrote"), [("adapt_to_machine", False), ("run_job", True), ("ending", True)])
@pytest.mark.parametrize("json_flag", [[], ["--json"]])
def test_an_interrupt_says_that_nothing_was_written_only_where_nothing_was(
    where: str, wrote: bool, json_flag: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_run, "run_job", lambda *_: JobOutcome(0, "finished"))
    monkeypatch.setattr(train if where == "adapt_to_machine" else local_run, where, interrupt)
    code = main(["train", *QUICK, *json_flag])
    out, err = capsys.readouterr()
    finished = where == "ending" and json_flag  # which prints no ending
    assert code == (0 if finished else 130)
    assert ("nothing was written" in err) == (not wrote) and ("no checkpoint yet" in err) == (wrote and not finished)
    assert list(Path("runs").glob("*/*/config.yaml")) != [] if wrote else not Path("runs").exists()
    if json_flag and wrote:
        assert json.loads(out)["exit_code"] == code


def test_an_interrupted_run_and_one_that_failed_say_what_there_is_to_go_on_from() -> None:
    run = new_run(prepared(*QUICK), Started("person"))
    interrupted, failed = JobOutcome(130, "interrupted", "interrupted"), JobOutcome(1, "failed", "error")
    assert local_run.saved_before(run, failed) == ""
    advice = local_run.saved_before(run, interrupted)
    assert prepared(*QUICK, *(word for word in advice.split() if "=" in word)).config.checkpoint.interval == 100
    (run.checkpoints / "step-9").mkdir()
    (run.checkpoints / "latest").write_text("step-9\n")
    advice = local_run.saved_before(run, interrupted)
    assert "step-9" in advice
    assert last_checkpoint(RunDir(Path(shlex.split(advice)[-1]).absolute())) is not None
    assert local_run.saved_before(run, failed) == advice
    assert local_run.saved_before(run, JobOutcome(75, "stopped", "stopped after saving")) == ""


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (["recipe=quickstart", "pp=4"], "+recipe=quickstart parallel.pipeline_model_parallel_size=4"),
        (["+recipe=quickstart", "data.path=texts/**/*.txt"], "+recipe=quickstart 'data.path=texts/**/*.txt'"),
        (["layout=Ett|ttL"], "'parallel.pipeline_model_parallel_layout=Ett|ttL'"),
        (["log.name='a b'"], "'log.name=a b'"),
        (["log.name='null'"], """'log.name='"'"'null'"'"''"""),
    ],
)
def test_overrides_are_shown_as_a_person_types_them(typed: list[str], shown: str) -> None:
    given = arguments(*typed).line.overrides
    assert retyped(given) == shown
    assert arguments(*shlex.split(shown)).line.overrides == given


def test_a_job_on_gpus_has_a_queue_for_every_stream_and_a_single_one_is_refused(capsys, monkeypatch) -> None:
    """`submit` looked at the variable never, and the job hung."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)  # which a pipeline of an earlier test has set
    asked = ["submit", "+recipe=quickstart", "launch.transport=channels", "launch.device=cuda", "--dry-run"]
    assert main(asked) == 0
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=32\n" in capsys.readouterr().out
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert main(asked) == 2
    assert "error PP-E608: " in capsys.readouterr().err
    assert main([*asked[:-2], "launch.device=cpu", "--dry-run"]) == 0


def test_a_persons_settings_of_the_allocator_are_kept_and_said(capsys, monkeypatch) -> None:
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    asked = ["submit", "+recipe=quickstart", "launch.device=cuda", "--dry-run"]
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert "export PYTORCH_ALLOC_CONF=expandable_segments:True\n" in out and "is kept" not in err
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert main(asked) == 0
    out, err = capsys.readouterr()
    assert "ALLOC_CONF" not in out
    assert "note: PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:64 is kept" in " ".join(err.split())


def test_deterministic_mode_reaches_a_jobs_ranks_as_an_environment_and_another_one_is_refused(capsys) -> None:
    asked = ["submit", "+recipe=quickstart", "launch.device=cuda", "parallel.deterministic_mode=true", "--dry-run"]
    assert main(asked) == 0
    assert "export CUBLAS_WORKSPACE_CONFIG=:4096:8\n" in capsys.readouterr().out
    other = "launch.env.CUBLAS_WORKSPACE_CONFIG=:0:0"
    for command in (asked, ["train", *asked[1:-1]]):
        assert main([*command, other]) == 2
        assert "error PP-E609: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "source", "device"),
    [
        ([], "somewhere", "cpu"),
        (["launch.device=cuda"], "somewhere", "cuda"),
        (["launch.device=any"], "somewhere", "any"),
        ([], None, "cuda"),
    ],
)
def test_a_model_that_is_here_trains_on_the_cpu_of_a_machine_without_gpus(
    capsys: pytest.CaptureFixture[str], typed: list[str], source: str | None, device: str
) -> None:
    composed, plan, _ = planned(["pp=1", *typed])
    assert composed is not None and plan is not None
    config = with_value(composed.config, "model", from_=source)
    assert local_run._asked_device(config, plan) == device
    noted = "this machine has no GPU: ranks run on the CPU, over gloo" in capsys.readouterr().err
    assert noted == (device == "cpu")


def test_what_is_loaded_is_resumed_if_it_is_there_and_else_the_run_begins(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["+recipe=quickstart", "launch.device=cpu", "log.dir=out", "--load", "out"]
    first = prepared(*typed)
    assert (first.config.checkpoint.load, first.config.checkpoint.resume) == ("out", None)
    assert "nothing is there yet, so the run begins" in capsys.readouterr().err
    step = new_run(first, Started("person")).checkpoints / "step-3"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    again = prepared(*typed).config.checkpoint
    assert (again.load, again.resume) == (None, str(step))
    assert f"checkpoint.load=out: going on from {step}" in capsys.readouterr().err


@pytest.mark.parametrize("started", [Started("person"), Started("torchrun", 0, 2, "id", 0, {"LOCAL_WORLD_SIZE": "2"})])
def test_copies_on_a_neighbours_host_are_refused_where_there_is_one_host(started: Started) -> None:
    typed = ["+recipe=quickstart", "launch.device=cpu", "checkpoint.local=/dev/shm/x", "checkpoint.local_every=2"]
    with pytest.raises(ConfigError, match=r"PP-E544: .* the ranks are on one host") as caught:
        train.prepare(front.parse("train", train, [*typed, "checkpoint.local_replicas=1"]), started)
    assert [problem.remedy for problem in caught.value.problems] == ["checkpoint.local_replicas=0"]
    there = Started("torchrun", 0, 2, "id", 0, {"LOCAL_WORLD_SIZE": "1"})
    train.prepare(front.parse("train", train, [*typed, "checkpoint.local_replicas=1"]), there)
