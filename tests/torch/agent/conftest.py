"""A run in SLURM's job, and what its agents requeue."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppctl.agent import job, requeue
from ppctl.config.schema import RunConfig
from ppctl.runs.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run in the job 7, whose present start is its first."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    run = RunDir(tmp_path)
    run.write_config(RunConfig())
    (tmp_path / "life").write_text("7.0")
    return run


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The jobs that agents requeue; nobody waits."""
    jobs: list[str] = []
    monkeypatch.setattr(job.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(requeue.slurm, "requeue", lambda job, without: jobs.append(job))
    return jobs
