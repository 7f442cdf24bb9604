"""Nodes that are sick, and nodes that are lost: told by name, and left out of the run's next life."""

from __future__ import annotations

import pytest
from cluster import TWO, Cluster, Submitted, wait
from oracle.reference import reference_losses

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def assert_left_as_it_is(run: Submitted) -> None:
    """The ranks of the lost node woke up, failed, and left the run as it is."""
    wait(lambda: not run.processes(), "the lost ranks to leave")
    assert (run.told("status.json")["state"], list(run.run.glob("errors/*"))) == ("finished", [])


def test_a_lost_node_is_named_by_another_and_the_run_goes_on_without_it(cluster: Cluster) -> None:
    """The other node tells long before SLURM notices."""
    limit = 6  # while a step is computed: a save may take longer
    frail = ("launch.partition=frail", f"launch.step_limit={limit}s")
    run = cluster.submit(*TWO, "steps=12", "checkpoint.interval=4", *frail, SLOW_STEP="1")
    run.trains(5)
    with run.without("ppctl8") as began:
        (error,) = wait(run.told_errors, "an error record")
        assert (error["rank"], error["code"], error["host"]) == (1, "PP-E706", "ppctl8")
        assert "its host ppctl8 does not answer" in error["message"]
        assert error["time"] - began < 1.5 * limit
        assert run.ends() == "COMPLETED", run.log()
        assert (run.restarts(), cluster.job(run.job, "NodeList")) == (1, "ppctl[7,9]")
        assert "requeue 1 of at most 10, without ppctl8: rank 1" in run.log()
        assert [step for step, *_ in run.numbers()] == list(range(1, 13))
    assert_left_as_it_is(run)


def test_a_spare_takes_the_place_of_a_lost_node_inside_the_job(cluster: Cluster) -> None:
    spared = ("launch.partition=spared", "launch.spares=1")
    run = cluster.submit(*TWO, "steps=14", "checkpoint.interval=4", *spared, SLOW_STEP="1")
    run.trains(5)
    nodes = run.starts()[0]["nodes"]
    node = next(name for name in nodes if name != "ppctl12")
    (spare,) = {"ppctl12", "ppctl13", "ppctl14"} - {*nodes}
    with run.without(node):
        assert run.ends() == "COMPLETED", run.log()
        assert run.restarts() == 0
        assert str(run.starts()[1]["why"]).endswith(f"{node} has gone; {spare} takes its place")
        assert [step for step, *_ in run.numbers()] == list(range(1, 15))
    assert_left_as_it_is(run)


def test_without_a_spare_the_job_goes_on_with_fewer_nodes(cluster: Cluster) -> None:
    """By a plan of one replica in place of two, with the same global batch."""
    two = ("nodes=2", "gpus_per_node=1", "pp=1", "launch.partition=spared", "launch.shrink=smaller")
    run = cluster.submit(*two, "steps=14", "checkpoint.interval=4", SLOW_STEP="1")
    run.trains(5)
    first, lost = map(str, run.starts()[0]["nodes"])  # type: ignore[call-overload]
    with run.without(lost):
        assert run.ends() == "COMPLETED", run.log()
        assert run.restarts() == 0
        assert [life["nodes"] for life in run.starts()] == [[first, lost], [first]]
        assert f"{lost} has gone" in str(run.starts()[1]["why"]) and "1 of 2 nodes go on with" in run.log()
        assert [step for step, *_ in run.numbers()] == list(range(1, 15))
        assert [loss for _, loss, _ in run.numbers()] == pytest.approx(reference_losses(run.run, 14), rel=1e-6)
    assert_left_as_it_is(run)


def test_a_node_whose_health_check_fails_is_left_out(cluster: Cluster) -> None:
    check = 'launch.health_check=[ "$SLURMD_NODENAME" != ppctl4 ]'
    run = cluster.submit(*TWO, "steps=2", "launch.partition=sick", check)
    assert run.ends() == "COMPLETED", run.log()
    assert "PP-E625: the health check failed on ppctl4" in run.log()
    assert (run.restarts(), cluster.job(run.job, "NodeList")) == (1, "ppctl[5-6]")


def test_a_request_during_a_health_check_requeues_the_job_with_all_nodes(cluster: Cluster) -> None:
    """One node has answered before it comes."""
    check = "launch.health_check=[ $SLURM_NODEID = 0 ] || { echo waits; sleep 200; }"
    run = cluster.submit(*TWO, "steps=2", check)
    wait(lambda: "waits" in run.log(), "the health check")
    assert cluster.ppctl("requeue", run.job).returncode == 0
    wait(lambda: run.restarts() == 1, f"a requeue\n{run.log()}")
    assert "requeue 1 of at most 10: USR1 during the health check" in run.log()
    assert cluster.job(run.job, "ExcNodeList") == "(null)"
    cluster.command("scancel", run.job)
