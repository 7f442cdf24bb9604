"""A submitted run and the end of its time."""

from __future__ import annotations

import pytest
from cluster import TWO, Cluster, Submitted

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_the_stop_begins_before_the_time_limit_and_requeue_goes_on(cluster: Cluster) -> None:
    """A limit of a minute leaves less than the margin: each life does one step, and this job may have one only."""
    limit = ("launch.time=1", "launch.signal_lead=5", "launch.max_requeues=0")
    run = cluster.submit(*TWO, "steps=2", *limit)
    assert run.ends() == "FAILED"
    assert cluster.job(run.job, "ExitCode") == "75:0"
    assert "PP-E626" in run.log()
    status = run.told("status.json")
    assert (status["state"], status["message"], len(run.metrics())) == ("stopped", "its time is nearly over", 1)
    assert cluster.ppctl("requeue", run.job).returncode == 0
    again = Submitted(cluster, run.run, run.told("job.json")["job"])
    assert again.ends() == "COMPLETED", again.log()
    assert (again.job != run.job, [step for step, *_ in again.numbers()]) == (True, [1, 2])
    assert cluster.ppctl("requeue", again.job).returncode == 2  # it has done its steps


def test_slurms_own_timer_tells_the_ranks_before_the_limit(cluster: Cluster) -> None:
    """SLURM looks every half minute: it signals 10 to 40 s after the start; rank 0's clock would after 2 min."""
    limit = ("launch.time=3", "launch.signal_lead=140", "launch.max_requeues=0")
    run = cluster.submit(*TWO, "steps=1000", *limit, SLOW_STEP="0.5")
    assert run.ends() == "FAILED"
    status, (checkpoint,) = run.told("status.json"), run.run.glob("checkpoints/step-*")
    assert (status["state"], status["message"]) == ("stopped", "USR1 on every rank")
    assert f"stopped after step {status['step']}, all saved: USR1 on every rank; {checkpoint}" in run.log()
    assert (checkpoint.name, len(run.metrics())) == (f"step-{status['step']}", status["step"])
