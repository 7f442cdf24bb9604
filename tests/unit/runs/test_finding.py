"""Finding a run by what a person calls it."""

import os
from pathlib import Path

import pytest

from ppctl.config.schema import RunConfig
from ppctl.errors import CheckpointError, ConfigError, PpctlError
from ppctl.launch.weights import find_weights
from ppctl.runs.finding import checkpoint_if_any, find_checkpoint, find_run
from ppctl.runs.rundir import RunDir


def make(root: Path, run_id: str, name: str) -> RunDir:
    return RunDir.create(root, name, lambda draft: draft.write_config(RunConfig()), run_id)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for age, (name, run_id) in enumerate([("a", "20260101-1"), ("a", "20260101-2"), ("b", "4711.0"), ("b", "47110.0")]):
        run = make(tmp_path, run_id, name)
        run.write_environment({"variables": {"SLURM_JOB_ID": "99"} if run_id == "20260101-1" else {}})
        os.utime(run.path / "config.yaml", (1000.0 + age, 1000.0 + age))
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        (None, "47110.0"),
        ("20260101-2", "20260101-2"),
        ("4711", "4711.0"),
        ("4711.0", "4711.0"),
        ("47110", "47110.0"),
        ("99", "20260101-1"),
        ("latest", "47110.0"),
        ("a/latest", "20260101-2"),
        ("a/20260101-1", "20260101-1"),
        ("b/4711.", "4711.0"),
        ("c", "3"),
        ("c/", "3"),
    ],
)
def test_a_run_is_found_by_id_name_prefix_job_or_as_the_newest(root: Path, reference: str | None, found: str) -> None:
    os.utime(make(root, "3", "c").path / "config.yaml", (1.0, 1.0))
    assert find_run(reference, root).id == found


def test_a_run_is_found_by_its_directory_from_anywhere(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root / "a")
    run = find_run("20260101-1", Path("nowhere"))
    assert (run.id, run.name) == ("20260101-1", "a")
    assert run.path.is_absolute()


@pytest.mark.parametrize(
    ("reference", "says", "lists"),
    [
        ("2026", "PP-E612: 2026 means 2 runs", ["20260101-2", "20260101-1"]),
        ("nine", "PP-E611: no run under", ["47110.0", "4711.0", "20260101-2", "20260101-1"]),
    ],
)
def test_what_means_no_run_or_several_is_answered_with_the_candidates(
    root: Path, reference: str, says: str, lists: list[str]
) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        find_run(reference, root)
    (problem,) = caught.value.problems
    assert [line.split()[0] for line in problem.place.splitlines()] == lists
    assert problem.remedy == f"ppctl runs show {lists[0]}"
    with pytest.raises(ConfigError) as caught:
        find_run(reference, root, ("status", "--dir", "my runs", reference))
    assert caught.value.problems[0].remedy == f"ppctl status --dir 'my runs' {lists[0]}", "the command that was typed"


def test_an_empty_root_has_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PP-E611: there are no runs under"):
        find_run(None, tmp_path)


def saved(run: RunDir, step: int) -> Path:
    """A checkpoint of the run, as far as finding it goes."""
    path = run.checkpoints / f"step-{step}"
    path.mkdir(parents=True)
    (path / "manifest.json").write_text("{}")
    (run.checkpoints / "latest").write_text(path.name)
    return path


def test_what_is_loaded_if_there_is_any_is_the_newest_of_a_directory_of_runs(root: Path) -> None:
    assert checkpoint_if_any(str(root), Path("nowhere")) is None
    assert checkpoint_if_any(str(root / "not-there-yet"), Path("nowhere")) is None
    older, newer = find_run("20260101-1", root), find_run("4711", root)
    first = saved(older, 5)
    assert checkpoint_if_any(str(root), Path("nowhere")) == first
    second = saved(newer, 3)
    assert checkpoint_if_any(str(root), Path("nowhere")) == second
    assert checkpoint_if_any(str(older.path), Path("nowhere")) == checkpoint_if_any(str(first), root) == first


def test_a_checkpoint_is_found_below_a_home_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root))
    path = saved(find_run("20260101-1", root), 5)
    for look in (find_checkpoint, checkpoint_if_any, find_weights):
        for text in ("~/a/20260101-1", "~/a/20260101-1/checkpoints/step-5"):
            assert look(text, Path("nowhere")) == path
    for look, code in ((find_checkpoint, "PP-E615"), (find_weights, "PP-E520")):
        with pytest.raises(PpctlError, match=code):
            look("~nosuchuser/x", root)
    assert checkpoint_if_any("~nosuchuser/x", root) is None


def test_a_checkpoint_of_megatrons_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match=r"PP-E615: checkpoint\.load=.* is a checkpoint of Megatron's"):
        checkpoint_if_any(str(tmp_path), tmp_path)


def test_a_missing_checkpoint_is_reported_under_the_name_that_was_typed(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match="PP-E615: ckpt export --hf=nowhere: there is no such checkpoint"
    ) as error:
        find_checkpoint("nowhere", tmp_path, "ckpt export --hf")
    assert "checkpoint.resume" not in str(error.value)
