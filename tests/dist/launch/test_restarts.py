"""A job that torchrun starts again, whole: which step it goes on from, and what stays of what it had written."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import TINY, environment, free_port, metrics, only_run, ppctl

from ppctl.runs.checkpoint_folder import LATEST, MANIFEST

pytestmark = pytest.mark.timeout(180)

TRAIN = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", "checkpoint.interval=2", "checkpoint.keep=0", "steps=8")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(random.Random(0).choices(["stage", "rank", "bubble", "and", "a", "layer"], k=3000)))
    return f"data.path={path}"


def ranks(text: str, cwd: Path, restarts: int, **more: str) -> tuple[list[int], str]:
    """The two ranks of a job as torchrun's agent starts them, for the first time or again; exit codes and stderr."""
    told = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    told |= {"TORCHELASTIC_RUN_ID": "night-7", "TORCHELASTIC_RESTART_COUNT": str(restarts)} | more
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "ppctl", *TRAIN, text],
            cwd=cwd,
            env=environment(**told, RANK=str(rank), LOCAL_RANK=str(rank)),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120)[1] for process in started]
    return [process.returncode for process in started], "".join(said)


@pytest.fixture(scope="module")
def failed_in_step_7(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a job of eight steps failed in its seventh: step-2, step-4 and step-6 are complete."""
    cwd = tmp_path_factory.mktemp("failed")
    codes, said = ranks(text, cwd, 0, PPCTL_FAULT="raise 1 6 1F0")
    assert 0 not in codes, said
    run = only_run(cwd)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == [LATEST, "step-2", "step-4", "step-6"]
    assert len(metrics(run)) == 6
    return cwd


@pytest.fixture
def run(failed_in_step_7: Path, tmp_path: Path) -> Path:
    """A copy of that job's run, in tmp_path/runs."""
    shutil.copytree(failed_in_step_7 / "runs", tmp_path / "runs")
    return only_run(tmp_path)


def test_a_job_with_an_empty_latest_that_torchrun_starts_again_goes_on_from_the_newest_checkpoint(
    run: Path, text: str, tmp_path: Path
) -> None:
    before, checkpoint = metrics(run), (run / "checkpoints" / "step-4" / MANIFEST).stat()
    (run / "checkpoints" / LATEST).write_text("")
    codes, said = ranks(text, tmp_path, 2)
    assert codes == [0, 0], said
    warnings = [line for line in said.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == 1 and warnings[0].endswith("; using step-6, the newest complete checkpoint there")
    after = metrics(run)
    assert after[:6] == before, "these records, with their times, are of the first life"
    assert [record["step"] for record in after] == list(range(1, 9))
    names = {LATEST, "step-2", "step-4", "step-6", "step-8"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == names
    assert (run / "checkpoints" / LATEST).read_text() == "step-8\n"
    assert (run / "checkpoints" / "step-4" / MANIFEST).stat() == checkpoint, "nothing was saved anew"


@pytest.mark.whole
def test_a_job_goes_on_from_a_checkpoint_that_a_crash_left_moved_aside(run: Path, text: str, tmp_path: Path) -> None:
    """Killed while a new step-6 was about to take the place of the old one."""
    (run / "checkpoints" / "step-6").rename(run / "checkpoints" / "step-6.old")
    before = metrics(run)
    codes, said = ranks(text, tmp_path, 1)
    assert codes == [0, 0], said
    assert "warning" not in said
    assert metrics(run)[:6] == before and len(metrics(run)) == 8
    names = {LATEST, "step-2", "step-4", "step-6", "step-8"}
    assert {path.name for path in (run / "checkpoints").iterdir()} == names, "the next save gave it its name back"


def test_a_job_goes_on_though_the_agent_of_rank_0_has_counted_no_restart(run: Path, text: str, tmp_path: Path) -> None:
    """A rank of another node failed, whose agent alone has counted it."""
    before = metrics(run)
    codes, said = ranks(text, tmp_path, 0)
    assert codes == [0, 0], said
    assert only_run(tmp_path) == run and metrics(run)[:6] == before and len(metrics(run)) == 8


def test_a_checkpoint_without_a_manifest_ends_the_job_with_3_and_a_remedy_that_goes_on(
    run: Path, text: str, tmp_path: Path
) -> None:
    (run / "checkpoints" / "step-6" / MANIFEST).unlink()
    before = metrics(run)
    codes, said = ranks(text, tmp_path, 1)
    assert codes == [3, 3], said
    assert "error PP-E501" in said
    assert metrics(run) == before
    record = json.loads((run / "errors" / "rank-0000.json").read_text())
    words = record["remedy"].replace("'", "").split()
    assert words[:2] == ["ppctl", "resume"]
    assert ppctl(*words[1:], cwd=tmp_path).returncode == 0
    assert metrics(run)[:4] == before[:4] and len(metrics(run)) == 8


def said_under_torchrun(world: int, *arguments: str) -> tuple[set[str], int, str]:
    """What the ranks of `start_again.py` say in both lives; the exit code and stderr of torchrun."""
    script = Path(__file__).parents[2] / "helpers" / "start_again.py"
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={world}", "--max-restarts=1"]
    done = subprocess.run(
        [*command, str(script), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    return {line for line in done.stdout.splitlines() if line.startswith("life")}, done.returncode, done.stderr


def test_ranks_that_torchrun_starts_again_read_nothing_that_an_earlier_start_left_in_the_store() -> None:
    """The agent keeps its store: the job of rank 0's earlier life and its addresses still stand there."""
    said, code, error = said_under_torchrun(2)
    assert said == {f"life {life} rank {rank} read {life} of 2" for life in (0, 1) for rank in (0, 1)}, error
    assert code == 0


def test_a_rank_that_missed_the_first_start_does_not_take_it_for_the_second() -> None:
    """It comes before rank 0, whose first start still counts one rank too few."""
    said, code, error = said_under_torchrun(3, "early")
    assert said == {f"life 1 rank {rank} read 1 of 3" for rank in range(3)}, error
    assert code == 0
