"""TensorBoard and Weights & Biases are asked before the ranks start, once; the real package where it can answer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ppctl.cli.main import main
from ppctl.config.schema import LogConfig, RunConfig
from ppctl.launch import trackers
from ppctl.launch.trackers import unusable


@pytest.fixture(autouse=True)
def nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a key, in a directory of its own."""
    monkeypatch.chdir(tmp_path)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    trackers._login_refused.cache_clear()
    return tmp_path


def refused(**log: object) -> list[tuple[str, str]]:
    return [(problem.code, problem.message) for problem in unusable(RunConfig(log=LogConfig(**log)))]


def wandb(directory: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put a package in the place of wandb, for the process that asks."""
    directory.mkdir(exist_ok=True)
    (directory / "wandb.py").write_text(f"def login(verify):\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", str(directory))
    monkeypatch.syspath_prepend(str(directory))


def test_without_a_key_the_run_is_refused_with_ways_out(capsys: pytest.CaptureFixture[str]) -> None:
    ((code, message),) = refused(wandb=True)
    assert code == "PP-E652" and "No API key configured" in message
    assert refused(wandb=True, wandb_mode="offline") == refused() == refused(tensorboard=True) == []
    assert capsys.readouterr().err.count("asking Weights & Biases") == 1


def test_the_mode_of_the_environment_and_of_the_ranks_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = RunConfig(log=LogConfig(wandb=True))
    config.launch.env = {"WANDB_MODE": "offline"}
    assert list(unusable(config)) == []
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert refused(wandb=True) == []
    assert [code for code, _ in refused(wandb=True, wandb_mode="online")] == ["PP-E652"], "the key is stronger"


def test_it_is_asked_once_for_several_runs_and_by_no_file_of_the_working_directory(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = nobody / "log"
    wandb(nobody / "here", monkeypatch, f"open({str(log)!r}, 'a').write('asked '); return True")
    (nobody / "wandb.py").write_text(f"open({str(log)!r}, 'a').write('planted ')")
    assert refused(wandb=True, wandb_project="a") == refused(wandb=True, wandb_project="b") == []
    assert log.read_text() == "asked "


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return False", "it has no API key"),
        ("raise RuntimeError('two\\nlines')", "lines"),
        ("import os; os._exit(3)", "its package has ended with exit code 3"),
        ("import time; time.sleep(60)", "it has not answered within 1 s"),
    ],
)
def test_whatever_it_answers_is_a_problem_and_not_an_exception(
    nobody: Path, monkeypatch: pytest.MonkeyPatch, body: str, says: str
) -> None:
    monkeypatch.setattr(trackers, "_PATIENCE_S", 1)
    wandb(nobody / "here", monkeypatch, body)
    ((code, message),) = refused(wandb=True)
    assert code == "PP-E652" and message.endswith(says)


def test_a_package_that_is_not_here_and_a_directory_that_cannot_be_written(
    nobody: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nobody / "file").write_text("")
    assert [code for code, _ in refused(tensorboard=True, tensorboard_dir="file/boards")] == ["PP-E652"]
    for nowhere in ("/proc/boards", "/sys/boards"):  # also for root, whom no mode keeps from there
        assert [code for code, _ in refused(tensorboard=True, tensorboard_dir=nowhere)] == ["PP-E652"]
    assert refused(tensorboard=True, tensorboard_dir="new/boards") == []
    assert [each.name for each in nobody.iterdir()] == ["file"]
    assert not (nobody / "new").exists(), "nothing is written before the run is accepted"
    for name in ("tensorboard", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    assert [code for code, _ in refused(tensorboard=True, wandb=True)] == ["PP-E704", "PP-E704"]


def test_without_a_directory_of_theirs_trackers_write_into_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/proc")
    assert refused(tensorboard=True) == refused(wandb=True, wandb_mode="offline") == []


def test_parity_has_no_trackers(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("log.wandb=true", "log.wandb_project=x", "log.tensorboard=true", "log.tensorboard_dir=y")
    assert main(["parity", "+recipe=quickstart", "launch.device=cpu", "pp=1", "vpp=1", *keys]) == 2
    assert next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error")).startswith(
        "error PP-E644: there is only one rank"
    )
