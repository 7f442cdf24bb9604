"""Runs behind a real SLURM: how they end is what their directory says, and they go on where they stopped."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from cluster import ROOT, SMALL, Cluster, Submitted, wait

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]

STEPS = 12
FOUR = ("nodes=2", "gpus_per_node=2", "pp=4", f"steps={STEPS}")
TWO = ("nodes=2", "gpus_per_node=1", "pp=2")


@pytest.fixture(scope="session")
def whole(cluster: Cluster) -> Submitted:
    """A run of 2 nodes x 2 ranks that nobody disturbs."""
    run = cluster.submit(*FOUR)
    assert run.ends() == "COMPLETED", run.log()
    return run


def test_a_run_of_two_nodes_by_two_ranks_is_done(whole: Submitted) -> None:
    assert [step for step, *_ in whole.numbers()] == list(range(STEPS))
    assert whole.told("result.json")["state"] == whole.told("status.json")["state"] == "finished"
    assert set(whole.told("result.json")["start_up"]) == {"compose", "import", "groups", "build", "warm-up", "load"}
    assert {path.name for path in whole.run.glob("logs/*")} == {"job.log", *(f"rank-000{n}.log" for n in range(4))}
    assert {path.name for path in whole.run.glob("heartbeats/*")} == {"ppctl1.json", "ppctl2.json"}
    told = whole.status()
    assert (told["state"], told["step"], told["job"]["state"]) == ("finished", STEPS, "COMPLETED")
    assert f"step {STEPS}/{STEPS}" in whole.cluster.ppctl("logs", whole.job).stdout


def test_one_rank_hears_usr1_and_all_save_requeue_and_finish_with_the_same_losses(
    cluster: Cluster, whole: Submitted
) -> None:
    """Saves take 0.2 to 5 s under --kill-on-bad-exit: a rank that left with an error would end the slow ones."""
    run = cluster.submit(*FOUR, SLOW_STEP="0.4", SLOW_SAVE="1,0.2,2,5")
    assert "--kill-on-bad-exit=1" in (run.run / "submit.sbatch").read_text()
    run.trains()
    os.kill(run.process(3), signal.SIGUSR1)
    wait(lambda: run.restarts() == 1, f"a requeue of {run.run}")
    (first,) = run.run.glob("checkpoints/step-*")
    assert len(list(first.glob("__*.distcp"))) == 4
    assert run.ends() == "COMPLETED", run.log()
    assert (run.restarts(), run.numbers()) == (1, whole.numbers())
    assert run.log().count("start-up ") == 2  # one log for both lives


def test_a_job_of_higher_priority_takes_the_nodes_and_the_run_goes_on_afterwards(
    cluster: Cluster, whole: Submitted
) -> None:
    run = cluster.submit(*FOUR, "launch.partition=low", SLOW_STEP="0.4")
    run.trains()
    taken = cluster.command(
        "sbatch", "--parsable", "--partition=main", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
    )
    assert taken.returncode == 0, taken.stderr
    assert run.ends() == "COMPLETED", run.log()
    assert cluster.job(taken.stdout.strip(), "JobState") == "COMPLETED"
    assert (run.restarts(), run.numbers()) == (1, whole.numbers())


def test_a_rank_that_raises_ends_the_job_and_its_error_comes_first(cluster: Cluster) -> None:
    run = cluster.submit(*TWO, "steps=50", RAISE="1 2")
    assert run.ends() == "FAILED"
    (error,) = [path for path in run.run.glob("errors/*") if path.name == "rank-0001.json"]
    assert time.time() - error.stat().st_mtime < 10
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
    assert cluster.ppctl("cancel", run.job).returncode == 0
    assert run.ends() == "CANCELLED"
    assert run.restarts() == 0
    wait(lambda: run.status()["state"] in ("stopped", "interrupted"), "the run's own word", 30)
    # Nor does a run start that waits for this one to finish.
    assert waits.ends() == "CANCELLED"
    assert waits.status()["state"] == "interrupted"


def test_a_run_waits_for_another_and_none_for_one_that_has_finished(cluster: Cluster, whole: Submitted) -> None:
    first = cluster.submit(*TWO, "steps=2")
    second = cluster.submit(*TWO, "steps=2", f"launch.after={first.job}")
    assert "--dependency=afterok:" in (second.run / "submit.sbatch").read_text()
    assert second.ends() == "COMPLETED", second.log()
    assert first.told("status.json")["time"] <= second.run.stat().st_mtime
    free = cluster.ppctl("submit", *SMALL, *TWO, f"launch.after={whole.run}", "--dry-run")
    assert free.returncode == 0 and "--dependency" not in free.stdout


def test_the_stop_begins_before_the_time_limit_and_requeue_goes_on(cluster: Cluster) -> None:
    """A limit of a minute leaves less than the margin: each life does one step, and this job may have one only."""
    limit = ("launch.time=1", "launch.signal_lead=5", "launch.max_requeues=0")
    run = cluster.submit(*TWO, "steps=2", *limit)
    assert run.ends() == "FAILED"
    assert cluster.job(run.job, "ExitCode") == "75:0"
    assert "PP-E626" in run.log()
    assert (run.told("status.json")["state"], len(run.metrics())) == ("stopped", 1)
    assert cluster.ppctl("requeue", run.job).returncode == 0
    again = Submitted(cluster, run.run, run.told("job.json")["job"])
    assert again.ends() == "COMPLETED", again.log()
    assert (again.job != run.job, [step for step, *_ in again.numbers()]) == (True, [0, 1])
    assert cluster.ppctl("requeue", again.job).returncode == 2  # it has done its steps


def test_a_node_whose_health_check_fails_is_left_out(cluster: Cluster) -> None:
    run = cluster.submit(*TWO, "steps=2", 'launch.health_check=[ "$SLURMD_NODENAME" != ppctl1 ]')
    assert run.ends() == "COMPLETED", run.log()
    assert "PP-E625: the health check failed on ppctl1" in run.log()
    assert (run.restarts(), cluster.job(run.job, "NodeList")) == (1, "ppctl[2-3]")


def test_a_run_loses_a_node_and_goes_on_without_it(cluster: Cluster) -> None:
    """SLURM itself finds the node gone (SlurmdTimeout), and requeues the job on the nodes that are left."""
    run = cluster.submit(*TWO, "steps=12", "checkpoint.interval=1", SLOW_STEP="0.5")
    run.trains()
    stopped = cluster.lose("ppctl2", run.job)
    assert len(stopped) >= 3  # slurmd, the step's daemon, a rank
    try:
        assert run.ends() == "COMPLETED", run.log()
        assert (run.restarts(), cluster.job(run.job, "NodeList")) == (1, "ppctl[1,3]")
        assert [step for step, *_ in run.numbers()] == list(range(12))
    finally:
        for number in stopped:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGCONT)
        wait(lambda: cluster.idle("ppctl2"), "ppctl2 to come back")
    # The ranks of the lost node wake up, fail, and leave the run as it is.
    assert (run.told("status.json")["state"], list(run.run.glob("errors/*"))) == ("finished", [])


def test_ranks_see_the_gpus_that_the_plan_asks_for(cluster: Cluster) -> None:
    """The GPUs are not real: SLURM hands them out, and torch says in its first error that it cannot use them."""
    show = 'launch.health_check=echo "$SLURMD_NODENAME sees $CUDA_VISIBLE_DEVICES of $SLURM_GPUS_ON_NODE"'
    plain = [word for word in SMALL if word != "launch.device=cpu"]
    done = cluster.ppctl("submit", *plain, "nodes=2", "gpus_per_node=2", "pp=4", "launch.device=cuda", show, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    run = Submitted(cluster, Path(told["run"]), told["job"])
    assert run.ends() == "FAILED"
    assert {f"ppctl{n} sees 0,1 of 2" for n in (1, 2)} <= set(run.log().splitlines())
    assert run.status()["errors"], run.log()


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("nodes=8", "gpus_per_node=1", "pp=2"), "PP-E627"),
        ((*TWO, "launch.partition=nowhere"), "PP-E621"),
        ((*TWO, 'launch.sbatch_args=["--gpus-per-task=99"]'), "PP-E621"),
        ((*TWO, "launch.after=nobody"), "PP-E61"),
    ],
)
def test_a_job_that_cannot_start_is_refused_at_once(
    cluster: Cluster, whole: Submitted, overrides: tuple[str, ...], said: str
) -> None:
    before = cluster.command("squeue", "-h", "-o", "%i").stdout
    done = cluster.ppctl("submit", *SMALL, "log.name=refused", *overrides)
    assert (done.returncode, done.stderr.startswith(f"error {said}")) == (2, True), done.stderr
    assert cluster.command("squeue", "-h", "-o", "%i").stdout == before


def test_an_interpreter_that_no_node_has_ends_the_job_with_one_sentence(cluster: Cluster) -> None:
    run = cluster.submit(*TWO, "launch.python=/nowhere/python")
    assert run.ends() == "FAILED"
    assert "error PP-E622: /nowhere/python does not start" in run.log()
    assert run.status()["state"] == "failed"


HAND_WRITTEN = {"single_node.sbatch": ("--nodes=1", "2"), "multi_node.sbatch": ("--nodes=2", "2")}


@pytest.mark.parametrize("name", HAND_WRITTEN)
def test_a_hand_written_script_trains_saves_and_goes_on(cluster: Cluster, name: str, tmp_path: Path) -> None:
    nodes, ranks = HAND_WRITTEN[name]
    text = (ROOT / "recipes" / "sbatch" / name).read_text()
    assert "+recipe=quickstart" in text
    script = tmp_path / name
    overrides = " ".join([*SMALL, f"log.name={script.stem}", "steps=6", "pp=2" if nodes == "--nodes=1" else "pp=4"])
    script.write_text(text.replace("+recipe=quickstart", overrides).replace("ppctl ", "python -m ppctl "))
    tasks = [] if nodes == "--nodes=1" else [f"--ntasks-per-node={ranks}"]
    options = ["--parsable", nodes, *tasks, "--gpus-per-node=0", "--time=10", "--exclusive=user"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = cluster.command("sbatch", *options, str(script), SLOW_STEP="0.5", PATH=path)
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()

    def found() -> Path | None:
        return next(iter(cluster.cwd.glob(f"runs/{script.stem}/*/metrics.jsonl")), None)

    run = Submitted(cluster, wait(found, f"steps of {name}").parent, job)
    full = ["--full"] if nodes == "--nodes=1" else []
    assert cluster.command("scancel", *full, "--signal=USR1", job).returncode == 0
    assert run.ends() == "COMPLETED", "".join(path.read_text() for path in cluster.cwd.glob(f"*{job}*"))
    assert run.restarts() == 1
    assert [step for step, *_ in run.numbers()] == list(range(6))
    assert len(list(cluster.cwd.glob(f"runs/{script.stem}/*/"))) == 1


def test_the_scripts_are_sound_bash() -> None:
    for script in (*ROOT.glob("recipes/sbatch/*.sbatch"), ROOT / "tests/slurm/cluster.sh"):
        subprocess.run(["bash", "-n", str(script)], check=True)
