"""A sweep as an array job of a real SLURM: each task is a run with a job number of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cluster import SMALL, TWO, Cluster, Submitted, wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def submitted(cluster: Cluster, *overrides: str, **more: str) -> list[Submitted]:
    done = cluster.ppctl("submit", "-m", *SMALL, *TWO, *overrides, "--json", **more)
    assert done.returncode == 0, done.stderr
    return [Submitted(cluster, Path(told["run"]), told["job"]) for told in json.loads(done.stdout)["runs"]]


def test_a_task_is_a_job_that_is_watched_cancelled_requeued_and_submitted_again(cluster: Cluster) -> None:
    typed = ("log.name=swept", "optim.lr=1e-3,3e-3", "steps=40")
    first, second = submitted(cluster, *typed, SLOW_STEP="0.5")
    assert (first.job.partition("_")[0], first.job[-2:], second.job[-2:]) == (second.job.partition("_")[0], "_0", "_1")
    first.trains()
    second.trains()
    assert f"job {second.job}: RUNNING" in cluster.ppctl("status", second.job).stdout
    assert (
        cluster.ppctl("requeue", first.job).stdout
        == f"job {first.job} was asked to save; its script then requeues it\n"
    )
    assert "is cancelled" in cluster.ppctl("cancel", second.job).stdout
    assert second.ends() == "CANCELLED"
    assert first.ends() == "COMPLETED", first.log()
    assert first.restarts() == 1 and "requeue 1 of at most 10" in first.log()
    assert first.status()["state"] == "finished"
    wait(lambda: second.status()["state"] in ("stopped", "interrupted"), "the second run's own word", 30)
    again = submitted(cluster, *typed)
    assert [run.run for run in again] == [first.run, second.run]
    assert again[0].job == first.job and "_" not in again[1].job, "one run alone is no array"
    assert again[1].ends() == "COMPLETED", again[1].log()
    assert again[1].status()["state"] == "finished"
