"""The node of the batch script is lost, in a job that SLURM does not end for it."""

from __future__ import annotations

import signal

import pytest
from cluster import TWO, Cluster, wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_job_that_outlives_its_nodes_is_requeued_when_its_script_is_lost(cluster: Cluster) -> None:
    """SLURM would let it run to its limit without a script: an agent that is left asks for the requeue, on other nodes."""
    headless = ("launch.partition=headless", "launch.shrink=smaller")
    run = cluster.submit(*TWO, "steps=8", "checkpoint.interval=2", *headless, SLOW_STEP="1")
    run.trains(3)
    cluster.lose("ppctl15", run.job, signal.SIGKILL)
    wait(lambda: run.restarts() == 1, "a requeue")
    assert "the host of the rendezvous" in next(run.run.glob("requeue.*.0")).read_text()
    assert cluster.command("slurmd", "-c", "-f", str(cluster.conf), "-N", "ppctl15").returncode == 0
    assert run.ends() == "COMPLETED", run.log()
    assert cluster.job(run.job, "NodeList") == "ppctl[16-17]"
    assert [step for step, *_ in run.numbers()] == list(range(1, 9))
