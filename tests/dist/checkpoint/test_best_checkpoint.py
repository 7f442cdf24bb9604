"""The best checkpoint by evaluation is kept through later saves and a resume, and named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import TINY, metrics, only_run, ppctl

from ppctl.launch.planning import planned
from ppctl.runs.checkpoint_folder import best, complete, expired, step_of

SMALL = ("+recipe=quickstart", *TINY, "layout=null", "vpp=1", "log.interval=1")
EVALUATED = ("data.validation_split=0.05", "train.eval_interval=1", "train.eval_steps=1")


def checkpoint(directory: Path, step: int, eval_loss: object) -> None:
    (path := directory / f"step-{step}").mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (path / "state.json").write_text(json.dumps({"eval_loss": eval_loss}))


def steps(paths: list[Path]) -> list[int]:
    return [step_of(path) for path in paths]


def test_one_rule_holds_the_last_those_of_every_nth_step_and_the_best(tmp_path: Path) -> None:
    for step, loss in enumerate([3.0, 1.5, 2.0, 1.5, None, float("nan"), "1.0", 2.5], start=1):
        checkpoint(tmp_path, step, loss)
    (tmp_path / "step-5" / "state.json").write_text("[]")
    assert steps(best(complete(tmp_path))) == [2, 4, 3, 8, 1]
    assert steps(expired(tmp_path, 8, 1)) == [1, 2, 3, 4, 5, 6, 7]
    assert steps(expired(tmp_path, 8, 1, 0, 1)) == [1, 3, 4, 5, 6, 7]
    assert steps(expired(tmp_path, 8, 2, 3, 2)) == [1, 5]
    assert steps(expired(tmp_path, 3, 1, 0, 1)) == [1]  # a run that goes on from step 3 has not seen what follows
    assert expired(tmp_path, 8, 0, 0, 1) == []


def test_a_save_that_follows_no_evaluation_is_refused_with_an_interval_that_fits() -> None:
    words = [*SMALL, "pp=1", "data.validation_split=0.05", "train.eval_steps=1", "checkpoint.keep_best=1"]
    for given, remedy in (
        (["train.eval_interval=4", "checkpoint.interval=6"], "checkpoint.interval=8"),
        (["train.eval_interval=4"], "checkpoint.interval=4"),
    ):
        (problem,) = planned([*words, *given])[2]
        assert problem.code == "PP-E103" and problem.remedy == remedy
        assert planned([*words, *given, remedy])[2] == []
    assert "checkpoint.keep_best=0" in {each.remedy for each in planned([*words, "checkpoint.interval=6"])[2]}


@pytest.mark.parametrize("background", ["true", pytest.param("false", marks=pytest.mark.whole)])
def test_a_run_keeps_its_best_checkpoint_and_so_does_the_run_that_goes_on(tmp_path: Path, background: str) -> None:
    keeping = ("checkpoint.interval=1", "checkpoint.keep=1", "checkpoint.keep_best=1", f"checkpoint.async={background}")
    # A rate that is far too high after some steps: the best is not the last.
    diverging = ("optim.lr=3.0", "optim.min_lr=3.0", "optim.warmup_steps=8", "optim.clip_grad=0")
    run = ppctl("train", *SMALL, "pp=2", *EVALUATED, *keeping, *diverging, "train.steps=8", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    where = only_run(tmp_path)

    def lowest() -> int:
        losses = {record["step"]: record["eval_loss"] for record in metrics(where)}
        return min(losses, key=lambda step: (losses[step], step))

    assert lowest() < 8
    assert steps(complete(where / "checkpoints")) == [lowest(), 8]
    on = ppctl("resume", str(where), "steps=11", "pp=1", "--allow", cwd=tmp_path)
    assert on.returncode == 0, on.stdout + on.stderr
    assert lowest() < 11 and steps(complete(where / "checkpoints")) == [lowest(), 11]

    listed = ppctl("ckpt", "inspect", str(where), cwd=tmp_path)
    (named,) = (line for line in listed.stdout.splitlines() if "the best by its evaluation" in line)
    assert named.split()[0] == f"step-{lowest()}"
    assert f"checkpoints/step-{lowest()}" in ppctl("runs", "show", str(where), cwd=tmp_path).stdout
    pruned = ppctl("ckpt", "prune", str(where), "--keep", "1", "--json", cwd=tmp_path)
    assert json.loads(pruned.stdout)["deleted"] == []
    pruned = ppctl("ckpt", "prune", str(where), "--keep", "1", "--keep-best", "0", "--json", cwd=tmp_path)
    assert json.loads(pruned.stdout)["deleted"] == [f"step-{lowest()}"]
