"""A run's job in a cluster: no way to it, and what its state makes of the run's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ppctl.cli.jobs import combined_state
from ppctl.errors import ConfigError
from ppctl.launch import kubernetes, slurm
from ppctl.launch.slurm import JobState


def test_without_the_package_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ConfigError, match=r"PP-E660.*not installed") as error:
        kubernetes.state("ppctl-1", "default")
    assert error.value.problems[0].remedy.endswith("-m pip install 'ppctl[kubernetes]'")


def test_without_a_configured_cluster_the_error_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="PP-E660: no cluster is configured here"):
        kubernetes.state("ppctl-1", "default")


@pytest.mark.parametrize(
    ("state", "job", "combined"),
    [
        ("queued", "RUNNING", "running"),
        ("queued", "COMPLETED", "finished"),
        ("queued", "FAILED", "failed"),
        ("stopped", "COMPLETED", "stopped"),
        ("running", "PENDING", "queued"),
        ("interrupted", "", "interrupted"),
    ],
)
def test_a_volume_that_is_not_seen_leaves_the_word_to_the_cluster(state: str, job: str, combined: str) -> None:
    assert combined_state(state, JobState("ppctl-1", "default", job)) == combined


def test_a_jobs_name_says_whose_it_is() -> None:
    assert slurm.is_job("123") and slurm.is_job("123_4") and not slurm.is_job("ppctl-20260101-1a2b")
