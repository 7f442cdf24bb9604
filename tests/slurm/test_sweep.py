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
    assert f"job {first.job}: RUNNING" in cluster.ppctl("status", first.job).stdout
    assert cluster.job(second.job, "JobId") == second.job.partition("_")[0], "the last task has the array's number"
    assert (
        cluster.ppctl("requeue", second.job).stdout
        == f"job {second.job} was asked to save; its script then requeues it\n"
    )
    wait(lambda: second.restarts() == 1, "a requeue of the second task")
    assert first.restarts() == 0 and cluster.job(first.job, "JobState") == "RUNNING"
    assert "is cancelled" in cluster.ppctl("cancel", first.job).stdout
    assert first.ends() == "CANCELLED"
    assert second.ends() == "COMPLETED", second.log()
    assert second.restarts() == 1 and "requeue 1 of at most 10" in second.log()
    assert second.status()["state"] == "finished"
    wait(lambda: first.status()["state"] in ("stopped", "interrupted"), "the first run's own word", 30)
    again = submitted(cluster, *typed)
    assert [run.run for run in again] == [first.run, second.run]
    assert "_" not in again[0].job and again[1].job == second.job, "one run alone is no array"
    assert again[0].ends() == "COMPLETED", again[0].log()
    assert again[0].status()["state"] == "finished"
