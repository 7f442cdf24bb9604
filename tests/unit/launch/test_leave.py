"""Entering and leaving a submitted job: the run directory decides, not srun's exit code."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ppctl.config.compose import compose
from ppctl.errors import ConfigError
from ppctl.launch.enter import check_node, go_on, package_digest
from ppctl.launch.leave import job_outcome, main
from ppctl.launch.outcome import JobOutcome
from ppctl.plan import build_plan
from ppctl.records.rank_records import RankFailure
from ppctl.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two ranks that was submitted."""
    config = compose(["+recipe=quickstart", "launch.device=cpu", "vpp=1"]).config

    def fill(draft: RunDir) -> None:
        draft.write_config(config)
        draft.write_plan(build_plan(config, {}))
        draft.write_status("running", step=3)

    return RunDir.create(tmp_path, "run", fill)


def fail(run: RunDir, rank: int, when: float) -> None:
    run.write_error(RankFailure(rank, f"from {rank}", "ValueError", time=when))


@pytest.mark.parametrize("code", [0, 1, 143])
def test_what_the_ranks_wrote_counts_whatever_srun_says(run: RunDir, code: int) -> None:
    run.write_result({"state": "finished", "step": 5})
    assert (job_outcome(run, code, ended=False).exit_code, job_outcome(run, code, ended=True).exit_code) == (0, 0)
    run.write_result({"state": "stopped", "step": 5})
    assert job_outcome(run, code, ended=False).exit_code == 75
    fail(run, 1, time.time())
    outcome = job_outcome(run, code, ended=False)
    assert (outcome.exit_code, outcome.state) == (1, "failed")


def test_the_first_error_comes_first(run: RunDir) -> None:
    fail(run, 0, time.time())
    fail(run, 1, time.time() - 5)
    assert job_outcome(run, 143, ended=False).report.startswith("error PP-E701: rank 1 failed: ValueError: from 1")


def test_a_full_disk_and_a_damaged_plan_change_no_exit_code(
    run: RunDir, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    run.write_heartbeats("node-0", {"host": "node-0", "time": 1.0, "ranks": []})
    run.write_error(RankFailure(1, "no such checkpoint", code="PP-E615", exit_code=3))
    (run.path / "plan.json").write_text("{")
    monkeypatch.setattr(RunDir, "write_status", full)
    assert main([str(run.path), "--step-code", "1"]) == 3
    said = capsys.readouterr().err
    assert said.startswith("error PP-E615: rank 1 failed: no such checkpoint")
    assert said.endswith(f"warning: {run.path / 'status.json'} cannot be written: No space left on device\n")
    assert run.heartbeats() == {}, "they made room"


def test_connections_that_break_when_a_job_is_ended_are_no_failure(run: RunDir) -> None:
    run.write_error(RankFailure(1, "Connection closed by peer [10.0.0.2]:7", "RuntimeError", time=1.0))
    assert job_outcome(run, 1, ended=False).state == "failed"
    assert job_outcome(run, 1, ended=True).exit_code == 143
    fail(run, 0, time.time())
    outcome = job_outcome(run, 1, ended=True)
    assert outcome.exit_code == 1 and outcome.report.startswith("error PP-E701: rank 0")


def test_an_end_after_the_last_save_says_what_is_missing(run: RunDir) -> None:
    last = run.read_config().train.steps
    for step, text in (
        (last - 1, "before all had saved"),
        (last, f"after the last save, step-{last}: only result.json"),
    ):
        (run.checkpoints / f"step-{step}").mkdir(parents=True)
        (run.checkpoints / "latest").write_text(f"step-{step}\n")
        outcome = job_outcome(run, 143, ended=True)
        assert text in outcome.report and (outcome.exit_code, outcome.state) == (143, "interrupted")


def test_silence_is_a_failure_and_an_end_from_outside_is_none(run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run.path), "--step-code", "0"]) == 1
    assert "PP-E703" in capsys.readouterr().err
    assert (run.status()["state"], run.status()["exit_code"]) == ("failed", 1)
    assert main([str(run.path), "--step-code", "143", "--ended"]) == 143
    assert run.status()["state"] == "interrupted"


def test_another_life_goes_on_from_the_last_checkpoint_and_keeps_old_errors_aside(run: RunDir) -> None:
    fail(run, 1, time.time())
    run.write_result({"state": "stopped"})
    (run.checkpoints / "step-7").mkdir()
    (run.checkpoints / "latest").write_text("step-7\n")
    go_on(run, "7.1")
    assert run.read_config().checkpoint.resume == str(run.checkpoints / "step-7")
    assert (run.errors(), run.result(), run.status()["state"]) == ([], {}, "starting")
    assert [path.name for path in (run.path / "errors-1").iterdir()] == ["rank-0001.json"]


def test_an_agents_own_problem_is_how_the_job_ended(run: RunDir) -> None:
    JobOutcome(2, "failed", "PP-E230: nothing fits").write(run, ())
    outcome = job_outcome(run, 1, ended=False)
    assert (outcome.exit_code, outcome.state, outcome.report) == (2, "failed", "")
    JobOutcome(1, "failed", "error PP-E703: gave no reason").write(run, ())
    assert "PP-E703" in job_outcome(run, 1, ended=False).report


def test_a_node_with_other_code_or_without_the_directory_is_told(run: RunDir, tmp_path: Path) -> None:
    check_node(run, package_digest())
    check_node(run, "live")
    for refused, code, problem in ((run, "0" * 16, "PP-E624"), (RunDir(tmp_path / "nowhere"), "live", "PP-E623")):
        with pytest.raises(ConfigError) as raised:
            check_node(refused, code)
        assert [found.code for found in raised.value.problems] == [problem]


def test_the_digest_changes_with_any_file_and_its_name_alone(tmp_path: Path) -> None:
    for name, text in (("a.py", "1\n"), ("b.py", "2\n"), ("notes.txt", "x")):
        (tmp_path / name).write_text(text)
    before = package_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("y")
    (tmp_path / "_conf").mkdir()
    (tmp_path / "_conf" / "__init__.py").write_text("")  # in an installed package
    assert package_digest(tmp_path) == before
    (tmp_path / "a.py").write_text("1 \n")
    assert package_digest(tmp_path) != before
    (tmp_path / "a.py").write_text("1\n")
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    assert package_digest(tmp_path) != before
