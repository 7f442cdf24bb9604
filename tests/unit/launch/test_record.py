"""env.json records what helps to repeat a run, and no secret."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import ppctl
from ppctl.launch.run_directory import _git, environment_record


def test_only_the_listed_variables_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "TORCH_NCCL_TRACE_BUFFER_SIZE", "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    for name in ("WANDB_API_KEY", "MY_NCCL_TOKEN", "SLURM_JOB_ID_SECRET", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "secret")
    record = environment_record("cpu", {"OMP_NUM_THREADS": "3", "HF_TOKEN": "secret"})
    assert record["variables"] == {
        "CUDA_VISIBLE_DEVICES": "1",
        "NCCL_DEBUG": "1",
        "OMP_NUM_THREADS": "3",
        "SLURM_JOB_ID": "1",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "1",
    }
    assert "secret" not in json.dumps(record)


def test_versions_and_the_machine_are_recorded() -> None:
    record = environment_record("cpu", {})
    assert record["ppctl"] == ppctl.__version__
    assert record["python"] == ".".join(map(str, sys.version_info[:3]))
    assert record["packages"]["omegaconf"]
    assert record["host"] and record["device"] == "cpu"


def test_the_commit_is_that_of_the_source() -> None:
    source = ppctl.__path__[0]
    head = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True)
    commit = environment_record("cpu", {})["commit"]
    if head.returncode:
        assert commit is None
    else:
        assert commit.rstrip("+") == head.stdout.strip()


def test_the_checkouts_index_is_left_alone(tmp_path: Path) -> None:
    """A killed run must not leave a lock there; `git status` takes one to note that a file's time is another."""
    for words in (["init", "-q"], ["add", "file"]):
        (tmp_path / "file").write_text("text")
        subprocess.run(["git", "-C", tmp_path, *words], check=True)
    os.utime(tmp_path / "file", (1, 1))
    index = tmp_path / ".git" / "index"
    before = index.read_bytes()
    assert _git(tmp_path, "status", "--porcelain", "--untracked-files=no") == "A  file"
    assert index.read_bytes() == before
