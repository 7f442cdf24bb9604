"""Runs in the tests' own cluster: pods are killed, evicted, held and never scheduled, and no bit of a loss changes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from command import TINY, free_port, metrics, only_run, ppctl
from fake_cluster import Cluster

pytestmark = pytest.mark.timeout(240)

STEPS = 24
"""Long enough for a command to be typed meanwhile, on a machine that is busy."""
PATIENCE = 150.0
SLOW = {"PPCTL_FAULT": "slow 1 0 1F0"}


class Run:
    """A run in the cluster: its directory on the volume, which the machine that submitted does not see."""

    def __init__(self, cluster: Cluster, home: Path, *words: str, steps: int = STEPS) -> None:
        self.cluster, self.home = cluster, home
        pods = ("launch.kubernetes.image=none", "launch.kubernetes.claim=runs")
        python = f"launch.python={sys.executable}"
        size = ("nodes=2", "gpus_per_node=1", "pp=2", "vpp=1", f"steps={steps}")
        done = self.ppctl(
            "submit", "--on", "kubernetes", "+recipe=quickstart", *TINY, *size, *pods, python,
            f"launch.kubernetes.mount={cluster.home / 'volume'}", *words, "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        told = json.loads(done.stdout)
        self.told, self.job = Path(told["run"]), told["job"]
        self.run = cluster.home / "volume" / "quickstart" / told["id"]

    def ppctl(self, *words: str) -> Any:
        return ppctl(*words, cwd=self.home, KUBECONFIG=str(self.cluster.kubeconfig))

    def status(self) -> dict[str, Any]:
        return json.loads(self.ppctl("status", str(self.told), "--json").stdout)

    def steps(self) -> int:
        return len(metrics(self.run)) if (self.run / "metrics.jsonl").exists() else 0

    def log(self) -> str:
        pods = [*self.cluster.gone, *self.cluster.pods]
        return "\n".join(
            f"--- {pod.name} {pod.phase} {pod.code}\n{pod.log.read_text()}" for pod in pods if pod.log.exists()
        )

    def until(self, condition: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < end, f"{what} has not come\n{self.log()}"
            time.sleep(0.05)

    def ends(self, kind: str = "Completed") -> None:
        self.until(lambda: self.cluster.condition(self.job), "the end")
        assert self.cluster.condition(self.job) == kind, self.log()

    def lives(self) -> list[dict[str, Any]]:
        """The records of the run's starts."""
        found: list[dict[str, Any]] = json.loads((self.run / "env.json").read_text())["starts"]
        return found

    def numbers(self) -> list[tuple[object, ...]]:
        return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(self.run)]


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster whose runs take a second for each step."""
    with Cluster(tmp_path, **SLOW) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[object, ...]]:
    """Step, loss and gradient norm of a run of two ranks on one machine."""
    cwd = tmp_path_factory.mktemp("undisturbed")
    done = ppctl("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", f"steps={STEPS}", cwd=cwd)
    assert done.returncode == 0, done.stderr
    (run,) = (cwd / "runs" / "quickstart").glob("*/")
    return [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(run)]


def test_a_run_in_pods_has_the_losses_of_one_machine(tmp_path: Path, undisturbed: list[tuple[object, ...]]) -> None:
    """Its commands ask the cluster that it was submitted to, whatever the current context is meanwhile."""
    with Cluster(tmp_path) as cluster:
        run = Run(cluster, tmp_path)
        cluster.change_context()
        run.ends()
        assert run.numbers() == undisturbed
        assert (run.status()["state"], run.status()["job"]["state"]) == ("finished", "COMPLETED")
        assert f"step {STEPS}/{STEPS}" in run.ppctl("logs", str(run.told)).stdout
        assert "secret" not in (run.told / "submit.yaml").read_text().replace("secretKeyRef", "").replace(
            "key: secret", ""
        )
        assert cluster.gone == [] and len(run.lives()) == 1


@pytest.mark.whole
def test_a_rank_that_dies_starts_again_in_its_pod(tmp_path: Path, undisturbed: list[tuple[object, ...]]) -> None:
    """Killed in its sixteenth step: the next life has no sixteenth."""
    with Cluster(tmp_path, PPCTL_FAULT="kill 1 15 1B0") as cluster:
        run = Run(cluster, tmp_path, "checkpoint.interval=3")
        run.ends()
        assert run.numbers() == undisturbed
        _, second = run.lives()
        assert (second["step"], second["why"]) == (15, "rank 1: killed by signal 9 (SIGKILL)")
        assert cluster.gone == []


@pytest.mark.whole
@pytest.mark.parametrize("index", [0, 1])
def test_a_pod_that_is_gone_is_made_again_and_the_other_lives_on(
    index: int, slow: Cluster, tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    run = Run(slow, tmp_path, "checkpoint.interval=3")
    run.until(lambda: run.steps() >= 5, "step 5")
    other = slow.running(1 - index)
    slow.kill(index)
    run.ends()
    assert run.numbers() == undisturbed
    assert slow.ends_of(index) == [137] and slow.ends_of(1 - index) == []
    assert other is not None and other.phase == "Succeeded"
    assert len(run.lives()) == 2


@pytest.mark.whole
def test_a_spare_takes_the_place_of_a_pod_that_no_machine_has_room_for(
    slow: Cluster, tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    """The death of a spare disturbs nobody, and the JobSet is complete though an index of it is not."""
    run = Run(slow, tmp_path, "checkpoint.interval=3", "launch.spares=1")
    run.until(lambda: run.steps() >= 3 and slow.running(0, "spare"), "step 3")
    slow.kill(0, "spare")
    run.until(lambda: slow.ends_of(0, "spare") and slow.running(0, "spare"), "another spare")
    slow.unschedulable = {1}
    slow.kill(1)
    run.until(lambda: slow.ranks(0, "spare"), "the spare's ranks")
    assert [*slow.ranks(0, "spare")] == [1]
    run.ends()
    assert run.numbers() == undisturbed
    assert slow.ends_of(0, "spare") == [137] and slow.ends_of(0) == [] and len(run.lives()) == 2
    assert "spare-0-0 takes its place" in run.lives()[1]["why"]
    run.until(lambda: not any(pod.phase == "Running" for pod in slow.pods), "the end of the spare")


@pytest.mark.whole
@pytest.mark.parametrize("index", [0, 1])
def test_an_evicted_pod_has_all_ranks_save_and_no_step_is_done_twice(
    index: int, slow: Cluster, tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    run = Run(slow, tmp_path)
    run.until(lambda: run.steps() >= 1, "step 1")
    if index == 0:
        done = run.ppctl("requeue", str(run.told))
        assert done.stdout == f"job {run.job} was asked to save; its pods then start it\n", done.stderr
    elif (pod := slow.running(index)) is not None:
        slow.evict(pod.name)
    run.until(lambda: slow.ends_of(index), "the end of the pod")
    saved = sorted(int(path.name.removeprefix("step-")) for path in run.run.glob("checkpoints/step-*"))
    run.ends()
    assert slow.ends_of(index) == [143] and slow.ends_of(1 - index) == [] and len(saved) == 1
    assert run.numbers() == undisturbed


@pytest.mark.whole
def test_a_held_job_waits_and_goes_on(slow: Cluster, tmp_path: Path, undisturbed: list[tuple[object, ...]]) -> None:
    run = Run(slow, tmp_path)
    run.until(lambda: run.steps() >= 3, "step 3")
    slow.suspend(run.job, True)
    run.until(lambda: not slow.pods, "the end of the pods")
    assert run.status()["state"] == "queued" and "suspended" in run.status()["job"]["reason"]
    slow.suspend(run.job, False)
    run.ends()
    assert run.numbers() == undisturbed


@pytest.mark.whole
def test_a_pod_without_a_place_is_told_and_the_job_can_be_cancelled(slow: Cluster, tmp_path: Path) -> None:
    slow.unschedulable = {1}
    run = Run(slow, tmp_path)
    run.until(lambda: slow.running(0), "pod 0")
    told = run.status()["job"]
    assert told["state"] == "RUNNING" and "insufficient nvidia.com/gpu" in told["reason"]
    assert run.ppctl("cancel", str(run.told)).returncode == 0
    run.until(lambda: not slow.objects and not slow.pods, "the end of all objects")
    assert "its scheduler does not show it" in run.ppctl("status", str(run.told)).stdout
    slow.unschedulable = set()
    again = run.ppctl("requeue", str(run.told))
    assert again.returncode == 0, again.stderr
    run.until(lambda: run.steps() >= 1, "step 1")


@pytest.mark.whole
@pytest.mark.parametrize(
    ("gone", "words"), [(0, ["launch.start_limit=20s"]), (1, ["launch.shrink=requeue", "launch.shrink_after=5s"])]
)
def test_without_the_rendezvous_or_with_requeue_without_a_pod_the_jobset_is_restarted(
    gone: int, words: list[str], slow: Cluster, tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    run = Run(slow, tmp_path, "checkpoint.interval=3", *words)
    run.until(lambda: run.steps() >= 5, "step 5")
    slow.unschedulable = {gone}
    slow.kill(gone)
    run.until(lambda: slow.objects["jobsets", run.job].get("status", {}).get("restarts"), "a restart")
    assert 76 in slow.ends_of(1 - gone)
    slow.unschedulable = set()
    run.ends()
    assert run.numbers() == undisturbed


@pytest.mark.whole
def test_on_fewer_pods_a_run_goes_on_in_another_cut_and_a_pod_that_comes_later_stands_by(
    slow: Cluster, tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    run = Run(slow, tmp_path, "pp=1", "checkpoint.interval=3", "launch.shrink=smaller", "launch.shrink_after=5s")
    run.until(lambda: run.steps() >= 5, "step 5")
    slow.unschedulable = {1}
    slow.kill(1)
    run.until(lambda: len(run.lives()) == 2, "a life on one pod")
    slow.unschedulable = set()
    run.until(lambda: slow.running(1), "pod 1")
    run.ends()
    assert [len(life["nodes"]) for life in run.lives()] == [2, 1]
    assert [row[0] for row in run.numbers()] == [row[0] for row in undisturbed]
    assert [row[1] for row in run.numbers()] == pytest.approx([row[1] for row in undisturbed], rel=1e-6)
    assert slow.ends_of(1) == [137] and "1 of 2 nodes go on with" in run.log()


@pytest.mark.whole
def test_what_another_pod_would_repeat_fails_the_job_at_once(slow: Cluster, tmp_path: Path) -> None:
    run = Run(slow, tmp_path, f"data.path={tmp_path / 'volume' / 'none.txt'}")
    run.ends("Failed")
    assert slow.ends_of(0) == [2] and "none.txt" in run.log()
    assert run.status()["state"] == "failed"
    again = run.ppctl("requeue", str(run.told))  # in place of the JobSet that has ended
    assert again.returncode == 0 and again.stdout.startswith(f"job {run.job} goes on from the beginning"), again.stderr
    run.ends("Failed")
    assert slow.ends_of(0) == [2, 2]
    assert not (slow.home / "volume" / "quickstart").exists() or not list(run.run.glob("metrics.jsonl"))


@pytest.mark.whole
def test_a_trainjobs_variables_are_read_as_torchrun_reads_them(
    tmp_path: Path, undisturbed: list[tuple[object, ...]]
) -> None:
    pets = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    words = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", f"steps={STEPS}")
    done = ppctl(*words, cwd=tmp_path, PET_MASTER_PORT=str(free_port()), **pets)
    assert done.returncode == 0, done.stderr
    assert [(row["step"], row["loss"], row["grad_norm"]) for row in metrics(only_run(tmp_path))] == undisturbed


def test_what_a_cluster_says_no_to_leaves_no_directory(tmp_path: Path) -> None:
    with Cluster(tmp_path) as cluster:
        with pytest.raises(AssertionError, match=r"PP-E661: the cluster refused to create the JobSet: 404"):
            Run(cluster, tmp_path, "launch.kubernetes.namespace=elsewhere")
        assert list((tmp_path / "runs").glob("*/*")) == []
