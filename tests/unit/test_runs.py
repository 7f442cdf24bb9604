"""Finding a run by what a person calls it."""

import os
from pathlib import Path

import pytest

from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.rundir import RunDir
from ppctl.runs import find_run


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
    ],
)
def test_a_run_is_found_by_id_prefix_job_or_as_the_newest(root: Path, reference: str | None, found: str) -> None:
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


def test_an_empty_root_has_no_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PP-E611: there are no runs under"):
        find_run(None, tmp_path)
