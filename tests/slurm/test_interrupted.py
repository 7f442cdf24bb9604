"""A submitted run that is asked to stop, or loses its nodes, goes on with the losses of an undisturbed one."""

from __future__ import annotations

import os
import signal

import pytest
from cluster import TWO, Cluster, Submitted, wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

STEPS = 12
FOUR = ("nodes=2", "gpus_per_node=2", "pp=4", f"steps={STEPS}")


@pytest.fixture(scope="session")
def whole(cluster: Cluster) -> Submitted:
    """A run of 2 nodes x 2 ranks that nobody disturbs."""
    run = cluster.submit(*FOUR)
    assert run.ends() == "COMPLETED", run.log()
    return run


def test_a_run_of_two_nodes_by_two_ranks_is_done(whole: Submitted) -> None:
    assert [step for step, *_ in whole.numbers()] == list(range(1, STEPS + 1))
    assert whole.told("result.json")["state"] == whole.told("status.json")["state"] == "finished"
    assert set(whole.told("result.json")["start_up"]) == {"compose", "import", "groups", "build", "warm-up", "load"}
    assert {path.name for path in whole.run.glob("logs/*")} == {"job.log", *(f"rank-000{n}.log" for n in range(4))}
    assert len(list(whole.run.glob("heartbeats/ppctl*.json"))) == 2
    told = whole.status()
    assert (told["state"], told["step"], told["job"]["state"]) == ("finished", STEPS, "COMPLETED")
    assert f"step {STEPS}/{STEPS}" in whole.cluster.ppctl("logs", whole.job).stdout


def test_one_rank_hears_usr1_and_all_save_requeue_and_finish_with_the_same_losses(
    cluster: Cluster, whole: Submitted
) -> None:
    """Saves take 0.2 to 5 s: agents whose ranks have left in good order end none that still save."""
    run = cluster.submit(*FOUR, SLOW_STEP="0.4", SLOW_SAVE="1,0.2,2,5")
    assert "--kill-on-bad-exit=0" in (run.run / "submit.sbatch").read_text()
    run.trains()
    os.kill(run.processes()[3], signal.SIGUSR1)
    wait(lambda: run.restarts() == 1, f"a requeue of {run.run}")
    (first,) = run.run.glob("checkpoints/step-*")
    assert len(list(first.glob("rank-*.safetensors"))) == 4
    assert run.ends() == "COMPLETED", run.log()
    assert (run.restarts(), run.numbers()) == (1, whole.numbers())
    assert run.log().count("start-up ") == 2  # one log for both lives


def test_ranks_start_again_inside_the_job_when_one_dies_and_when_one_stands_still(
    cluster: Cluster, whole: Submitted
) -> None:
    run = cluster.submit(*FOUR, "checkpoint.interval=3", "launch.step_limit=15s", SLOW_STEP="0.4")
    for life, (rank, strike) in enumerate(((3, signal.SIGKILL), (1, signal.SIGSTOP)), 1):
        wait(lambda: len(run.starts()) == life and len(run.metrics()) > 4 * life, f"life {life}\n{run.log()}")  # noqa: B023
        os.kill(run.processes()[rank], strike)
    assert run.ends() == "COMPLETED", run.log()
    assert (run.restarts(), run.numbers()) == (0, whole.numbers()), run.log()
    _, killed, stood = run.starts()
    assert killed["why"] == "rank 3: killed by signal 9 (SIGKILL)"
    assert str(stood["why"]).startswith("rank 1: ")
    assert "rank 3: killed by signal 9 (SIGKILL)" in run.cluster.ppctl("status", run.job).stdout


def test_a_job_of_higher_priority_takes_the_nodes_and_the_run_goes_on_afterwards(
    cluster: Cluster, whole: Submitted
) -> None:
    two = (*TWO, f"steps={STEPS}")  # another cut: the same bits
    run = cluster.submit(*two, "launch.partition=low", SLOW_STEP="0.4")
    run.trains()
    taken = cluster.command(
        "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    assert taken.returncode == 0, taken.stderr
    assert run.ends() == "COMPLETED", run.log()
    assert cluster.job(taken.stdout.strip(), "JobState") == "COMPLETED"
    assert (run.restarts(), run.numbers()) == (1, whole.numbers())
