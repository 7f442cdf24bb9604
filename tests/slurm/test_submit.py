"""Runs behind a real SLURM: how they end is what their directory says, and they go on where they stopped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cluster import SMALL, TWO, Cluster, Submitted, wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_rank_that_raises_ends_the_job_and_its_error_comes_first(cluster: Cluster) -> None:
    run = cluster.submit(*TWO, "steps=50", "launch.max_restarts=1", RAISE="1 0")
    assert run.ends() == "FAILED"
    _, error = sorted((error for error in run.told_errors() if error["rank"] == 1), key=lambda each: each["time"])
    assert cluster.end(run.job) - error["time"] < 15
    assert [start["step"] for start in run.starts()] == [0, 0]
    told = run.status()
    assert (told["state"], told["errors"][0]["rank"]) == ("failed", 1)
    assert told["errors"][0]["message"] == "struck by a test"
    assert "error PP-E701: rank 1 failed: ValueError: struck by a test" in run.log()
    assert run.restarts() == 0


def test_a_cancelled_job_ends_and_is_not_requeued(cluster: Cluster) -> None:
    run = cluster.submit(*TWO, "steps=500", SLOW_STEP="0.3")
    waits = cluster.submit(*TWO, "steps=2", f"launch.after={run.run}")
    run.trains()
    assert cluster.job(waits.job, "Reason") == "Dependency"
    assert "as the nodes published it" in cluster.ppctl("status", run.job).stdout
    assert cluster.ppctl("cancel", run.job).stdout.startswith(f"job {run.job} is cancelled; its ranks have until")
    assert run.ends() == "CANCELLED"
    assert run.restarts() == 0
    state = wait(
        lambda: (said := run.status()["state"]) in ("stopped", "interrupted") and said, "the run's own word", 30
    )
    assert cluster.ppctl("cancel", run.job).stdout == f"job {run.job} has ended: run {run.run.name} is {state}\n"
    # Nor does a run start that waits for this one to finish.
    assert waits.ends() == "CANCELLED"
    assert waits.status()["state"] == "interrupted"


def test_a_run_waits_for_another_and_none_for_one_that_has_finished(cluster: Cluster) -> None:
    first = cluster.submit(*TWO, "steps=2")
    second = cluster.submit(*TWO, "steps=2", f"launch.after={first.job}")
    assert "--dependency=afterok:" in (second.run / "submit.sbatch").read_text()
    assert second.ends() == "COMPLETED", second.log()
    assert first.told("status.json")["time"] <= second.run.stat().st_mtime
    free = cluster.ppctl("submit", *SMALL, *TWO, f"launch.after={first.run}", "--dry-run")
    assert free.returncode == 0 and "--dependency" not in free.stdout


def test_ranks_see_the_gpus_that_the_plan_asks_for(cluster: Cluster) -> None:
    """The GPUs are not real: SLURM hands them out, and torch says in its first error that it cannot use them."""
    show = 'launch.health_check=echo "$SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES of $SLURM_GPUS_ON_NODE"'
    plain = [word for word in SMALL if word != "launch.device=cpu"]
    done = cluster.ppctl("submit", *plain, "nodes=2", "gpus_per_node=2", "pp=4", "launch.device=cuda", show, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    run = Submitted(cluster, Path(told["run"]), told["job"])
    assert run.ends() == "FAILED"
    assert len({line for line in run.log().splitlines() if re.fullmatch(r"ppctl[0-9]+ sees 0,1 of 2", line)}) == 2
    assert run.status()["errors"], run.log()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("nodes=8", "gpus_per_node=1", "pp=2"), "PP-E627"),
        ((*TWO, "launch.time=2-00:00:00"), "PP-E627"),
        ((*TWO, "launch.partition=nowhere"), "PP-E621"),
        ((*TWO, 'launch.sbatch_args=["--gpus-per-task=99"]'), "PP-E621"),
        ((*TWO, "launch.after=nobody"), "PP-E61"),
    ],
)
def test_a_job_that_cannot_start_is_refused_at_once(cluster: Cluster, overrides: tuple[str, ...], said: str) -> None:
    done = cluster.ppctl("submit", *SMALL, "log.name=refused", *overrides)
    assert (done.returncode, done.stderr.startswith(f"error {said}")) == (2, True), done.stderr
    assert cluster.command("squeue", "-h", "-n", "ppctl-refused", "-o", "%i").stdout == ""


def test_a_job_that_can_no_longer_start_is_told_as_such(cluster: Cluster) -> None:
    """Without `launch.after`, whose script has SLURM cancel it, a job waits for a failed one for ever."""
    held = 'launch.sbatch_args=["--hold"]'
    first, second = (cluster.submit(*TWO, "steps=2", held) for _ in range(2))
    assert "PENDING (JobHeldUser)" in cluster.ppctl("status", first.job).stdout
    for change in (("update", f"JobId={second.job}", f"Dependency=afterok:{first.job}"), ("release", second.job)):
        assert cluster.command("scontrol", *change).returncode == 0
    assert cluster.ppctl("cancel", first.job).stdout == f"job {first.job} is cancelled\n"
    wait(lambda: cluster.job(second.job, "Reason") == "DependencyNeverSatisfied", "SLURM to see it")
    said = f"error PP-E627: it will never start: the run that it waits for has failed; ppctl cancel {second.run}\n"
    assert said in cluster.ppctl("status", second.job).stdout
    assert cluster.ppctl("cancel", second.job).returncode == 0
    assert (second.ends(), second.status()["state"]) == ("CANCELLED", "interrupted")


def test_an_interpreter_that_no_node_has_ends_the_job_with_one_sentence(cluster: Cluster) -> None:
    run = cluster.submit(*TWO, "launch.python=/nowhere/python")
    assert run.ends() == "FAILED"
    assert "error PP-E622: /nowhere/python does not start" in run.log()
    assert run.status()["state"] == "failed"
