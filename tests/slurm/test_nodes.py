"""Nodes that are sick, and nodes that are lost: told by name, and left out of the run's next life."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import pytest
from cluster import TWO, Cluster, wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_lost_node_is_named_by_another_and_the_run_goes_on_without_it(cluster: Cluster) -> None:
    """Its slurmd, its step's daemon and its rank stop at once: the other node tells long before SLURM notices."""
    limit = 6  # while a step is computed: a save may take longer
    frail = ("launch.partition=frail", f"launch.step_limit={limit}s")
    run = cluster.submit(*TWO, "steps=12", "checkpoint.interval=4", *frail, SLOW_STEP="1")
    run.trains(5)
    stopped = cluster.lose("ppctl8", run.job)
    began = time.time()
    assert len(stopped) >= 3
    try:
        (error,) = wait(run.told_errors, "an error record")
        assert (error["rank"], error["code"], error["host"]) == (1, "PP-E706", "ppctl8")
        assert "its host ppctl8 does not answer" in error["message"]
        assert error["time"] - began < 1.5 * limit
        assert run.ends() == "COMPLETED", run.log()
        assert (run.restarts(), cluster.job(run.job, "NodeList")) == (1, "ppctl[7,9]")
        assert "requeue 1 of at most 10, without ppctl8: error PP-E706: rank 1" in run.log()
        assert [step for step, *_ in run.numbers()] == list(range(1, 13))
    finally:
        for number in stopped:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)
    wait(lambda: not run.processes(), "the lost rank to leave")
    # It woke up, failed, and left the run as it is.
    assert (run.told("status.json")["state"], list(run.run.glob("errors/*"))) == ("finished", [])


def test_a_node_whose_health_check_fails_is_left_out(cluster: Cluster) -> None:
    check = 'launch.health_check=[ "$SLURMD_NODENAME" != ppctl4 ]'
    run = cluster.submit(*TWO, "steps=2", "launch.partition=sick", check)
    assert run.ends() == "COMPLETED", run.log()
    assert "PP-E625: the health check failed on ppctl4" in run.log()
    assert (run.restarts(), cluster.job(run.job, "NodeList")) == (1, "ppctl[5-6]")
