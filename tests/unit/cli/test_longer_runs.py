"""A run that goes on for longer: what its learning rate does, which jumps are refused, and what is recommended."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoint_states import write

from ppctl.cli import main as front
from ppctl.cli import resume, train
from ppctl.cli.longer import longer
from ppctl.cli.main import main
from ppctl.config.batch_sizes import steps_for_tokens
from ppctl.config.learning_rate import lr_at
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.launch.environment import Started
from ppctl.launch.run_directory import new_run
from ppctl.runs.rundir import RunDir

PERSON = Started("person")
TINY = ["+recipe=quickstart", "launch.device=cpu", "pp=1", "vpp=1", "model.num_layers=2"]
WSD = ["optim.lr_decay_style=WSD", "optim.lr_wsd_decay_steps=20"]
PIECES = "optim.lr_pieces=[{style: linear, until: 70, lr: 1e-3}]"


def run_of(*typed: str, done: int = 60) -> RunDir:
    """A run of 60 steps with a checkpoint after `done`."""
    run = new_run(train.prepare(front.parse("train", train, [*TINY, "steps=60", *typed]), PERSON), PERSON)
    write(run.checkpoints / f"step-{done}", "1")
    run.write_status("finished" if done == 60 else "stopped", step=done)
    return run


def resumed(run: RunDir, *typed: str) -> RunConfig:
    return resume.prepare(front.parse("resume", resume, [str(run.path), *typed]), run, PERSON)[0].config


def rate(config: RunConfig, step: int) -> float:
    return lr_at(step - 1, config.optim, config.train.steps, steps_for_tokens(config))


def arguments(command: str) -> list[str]:
    """What stands behind `resume RUN` in a command that was pasted into a shell."""
    words = shlex.split(command)
    return words[words.index("resume") + 2 :]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_decayed_rate_that_would_start_again_is_refused_with_numbers_and_choices() -> None:
    run = run_of("lr=3e-3", "optim.min_lr=0", "optim.warmup_steps=0")
    with pytest.raises(ConfigError) as caught:
        resumed(run, "steps=80")
    (problem,) = caught.value.problems
    assert problem.code == "PP-E617" and problem.place == "train.steps (command line)"
    rates = "214 times as high: 2.06e-06 in step 60, 0.000439 in step 61, 1.16e-06 in step 80"
    assert problem.message.startswith(f"the next step's learning rate would be {rates}. Choose: the decay ends")
    assert "the rate stays 0 (nothing is learned); a new warm-up; the rates of a run that" in problem.message


@pytest.mark.parametrize("changes", [[], ["optim.min_lr=0"], WSD, ["optim.lr_decay_style=linear"]])
@pytest.mark.parametrize("done", [60, 57])
def test_each_choice_works_when_pasted_and_only_the_last_one_jumps(changes: list[str], done: int) -> None:
    run = run_of(*changes, done=done)
    before = run.read_config()
    with pytest.raises(ConfigError) as caught:
        resumed(run, "steps=200")
    held, warm, again = (resumed(run, *arguments(line)) for line in caught.value.problems[0].remedy.splitlines())
    last = rate(before, done)
    assert [rate(held, step) for step in range(1, 61)] == [rate(before, step) for step in range(1, 61)]
    assert rate(held, 200) == before.optim.min_lr
    assert rate(warm, done + 1) == pytest.approx(last, rel=0.01) and rate(warm, 200) < 2 * max(last, 1e-5)
    assert max(rate(warm, step) for step in range(done + 1, 201)) == pytest.approx(before.optim.lr)
    assert again.optim == before.optim and rate(again, done + 1) > 2 * last


def test_a_new_warm_up_falls_again_before_the_end() -> None:
    """The recipe's warm-up of 20 steps is as long as what is left."""
    run = run_of("lr=3e-3", "optim.min_lr=1e-4", "optim.warmup_steps=20")
    with pytest.raises(ConfigError) as caught:
        resumed(run, "steps=80")
    warm = resumed(run, *arguments(caught.value.problems[0].remedy.splitlines()[1]))
    assert rate(warm, 71) == pytest.approx(3e-3) and rate(warm, 81) == pytest.approx(1e-4) and rate(warm, 80) < 3e-4


@pytest.mark.parametrize("other", ["train.global_batch_size=8", "optim.lr_decay_steps=80"])
def test_who_is_asked_to_allow_another_change_reads_of_the_jump_too(other: str) -> None:
    run = run_of("optim.warmup_steps=0")
    with pytest.raises(ConfigError) as caught:
        resumed(run, "steps=80", other)
    change, jump = caught.value.problems
    assert change.place.startswith(other.partition("=")[0]) and "times as high" in jump.message
    for line in jump.remedy.splitlines():
        assert resumed(run, *arguments(line)).train.steps == 80


def test_the_rate_that_is_told_is_the_one_of_the_command_below() -> None:
    """Typed rates are not in that command."""
    run = run_of("lr=3e-3", "optim.min_lr=1e-4", "optim.warmup_steps=0")
    with pytest.raises(ConfigError) as caught:
        resumed(run, "steps=80", "lr=9e-3", "optim.min_lr=3e-3")
    jump = caught.value.problems[-1]
    assert "as before, and the rate stays 0.0001;" in jump.message
    assert rate(resumed(run, *arguments(jump.remedy.splitlines()[0])), 80) == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("changes", "done", "typed"),
    [
        (["optim.lr_decay_style=constant"], 60, ["steps=200"]),
        (["optim.lr_decay_style=inverse-square-root"], 60, ["steps=200"]),
        (["optim.lr_decay_steps=50"], 60, ["steps=200"]),
        (["optim.lr_decay_style=piecewise", PIECES], 60, ["steps=200"]),
        (["optim.lr_decay_tokens=4e5"], 60, ["steps=200"]),
        (["optim.min_lr=1.5e-3"], 60, ["steps=200"]),
        (["optim.warmup_steps=50"], 1, ["steps=200"]),
        ([], 20, ["steps=200"]),
        ([], 30, ["steps=40"]),
        ([], 30, ["steps=30"]),
        ([], 1, []),
        ([], 59, []),
        ([], 59, ["gbs=8", "--allow"]),
        ([], 60, ["steps=61", "optim.lr_decay_steps=60"]),
        (WSD, 60, ["steps=61", "optim.lr_decay_steps=60"]),
    ],
)
def test_what_does_not_jump_goes_on_as_before(changes: list[str], done: int, typed: list[str]) -> None:
    run = run_of(*changes, done=done)
    if not typed:
        write(run.checkpoints / "step-2", "1")
    before, after = run.read_config(), resumed(run, *typed)
    assert rate(after, done + 1) <= 2 * max(rate(before, done), rate(before, done + 1))


def test_the_rates_are_told_before_they_change(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of("lr=1e-3", "optim.min_lr=1e-4", "optim.lr_decay_style=linear", "optim.warmup_steps=0", done=30)
    resumed(run, "steps=120")
    assert (
        "  learning rate: 0.000565 in step 30, 0.000775 in step 31, 0.000107 in step 120\n" in capsys.readouterr().err
    )
    resumed(run, "steps=120", "optim.warmup_steps=50", "--allow")
    peak = "0.000565 in step 30, 0.00062 in step 31, 0.001 in step 50, 0.000113 in step 120\n"
    assert peak in capsys.readouterr().err
    resumed(run, "optim.lr_decay_steps=60")
    err = capsys.readouterr().err
    assert "learning rate" not in err, "it is what it was"
    assert "  optim.lr_decay_steps: null -> 60\n" in err
    resumed(run, "steps=120", "optim.lr_decay_steps=60")
    held = "  learning rate: 0.000565 in step 30, 0.00055 in step 31, 0.0001 in step 120\n"
    assert held in capsys.readouterr().err, "another number of steps"


@pytest.mark.parametrize("key", ["lr=1e-3", "optim.min_lr=1e-5", "optim.lr_decay_steps=70", "optim.warmup_steps=3"])
def test_other_rates_are_refused_as_other_mathematics_and_told_once(key: str) -> None:
    with pytest.raises(ConfigError, match="PP-E617") as caught:
        resumed(run_of(done=30), key)
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([], "steps=120 optim.lr_decay_steps=60"),
        (WSD, "steps=120 optim.lr_decay_steps=60"),
        (["optim.lr_decay_style=constant"], "steps=120"),
        (["optim.lr_decay_style=inverse-square-root"], "steps=120"),
        (["optim.lr_decay_steps=60"], "steps=120"),
        (["optim.min_lr=0"], "steps=120 optim.lr_decay_style=piecewise"),
        (["optim.min_lr=0", *WSD], "steps=120 optim.lr_decay_style=piecewise"),
        (["optim.min_lr=0", "optim.lr_decay_steps=60"], "steps=120 optim.lr_decay_style=piecewise"),
    ],
)
def test_what_a_finished_run_recommends_works_and_neither_jumps_nor_stands_still(
    capsys: pytest.CaptureFixture[str], changes: list[str], words: str
) -> None:
    run = run_of(*changes)
    before, command = run.read_config(), longer("RUN", run.read_config())
    assert f"resume RUN {words}" in command
    after = resumed(run, *arguments(command))
    assert after.train.steps == 120 and 0 < rate(after, 61) <= rate(before, 60) * 1.01
    assert min(rate(after, step) for step in range(61, 121)) > 0
    assert main(["status", str(run.path), "--json"]) == 0
    assert arguments(json.loads(capsys.readouterr().out)["next"]) == arguments(command)


def test_a_length_in_tokens_gives_way_to_steps() -> None:
    run = run_of("gbs=16", "seq=256")
    config = run.read_config()
    run.write_config(replace(config, train=replace(config.train, tokens=60 * 16 * 256.0)))
    assert resumed(run, *arguments(longer("RUN", run.read_config()))).train.steps == 120


def test_a_new_run_from_a_checkpoint_is_told_what_its_rate_does(capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of("lr=3e-3", "optim.min_lr=0", "optim.warmup_steps=0")
    capsys.readouterr()
    typed = [*TINY, "lr=3e-3", "optim.min_lr=0", "optim.warmup_steps=0", f"checkpoint.resume={run.path}"]
    train.prepare(front.parse("train", train, [*typed, "steps=80"]), PERSON)
    assert "note: learning rate: 2.06e-06 in step 60, 0.000439 in step 61, 1.16e-06" in capsys.readouterr().err
    train.prepare(front.parse("train", train, [*typed, "steps=60"]), PERSON)
    assert "learning rate" not in capsys.readouterr().err


@pytest.mark.parametrize("optim", [{"lr_decay_style": "piecewise", "lr_pieces": [3]}, {"warmup_steps": -1, "lr": 0.0}])
def test_an_altered_config_is_refused_and_breaks_no_status(
    capsys: pytest.CaptureFixture[str], optim: dict[str, object]
) -> None:
    run = run_of()
    config = run.read_config()
    run.write_config(replace(config, optim=replace(config.optim, **optim)))
    assert main(["status", str(run.path)]) == 0
    assert f"resume {run.path} steps=120" in capsys.readouterr().out
    with pytest.raises(ConfigError):
        resumed(run, "steps=120", "--allow")
