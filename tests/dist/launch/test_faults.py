"""What can go wrong around a whole `ppctl train`: data, disks, agents. Rank failures are in test_train_command.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import TINY, alive, environment, losses, metrics, only_run, ppctl
from oracle.reference import reference_losses
from verified import verify

pytestmark = pytest.mark.timeout(120)

TRAIN = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1")


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    return f"data.path={tmp_path}/corpus.txt"


def test_every_bad_line_of_the_data_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{oops\n[1]\n{"body": "b"}\n')
    done = ppctl(*TRAIN, "data.path=bad.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    for line in (2, 3, 4):
        assert done.stderr.count(f"  bad.jsonl:{line}\n") == 1, done.stderr
    assert done.stderr.count("error PP-E403") == 3
    assert alive(tmp_path) == []


def test_a_disk_that_fills_while_training_ends_the_run_with_its_reason(text: str, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the metrics meet it first, in the middle of a line."""
    limit = (
        "import os, resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (24000,) * 2); os.execv(sys.argv[1], sys.argv[1:])"
    )
    command = [sys.executable, "-m", "ppctl", *TRAIN, text, "steps=100000", "checkpoint.interval=0"]
    done = subprocess.run(
        [sys.executable, "-c", limit, *command],
        cwd=tmp_path,
        env=environment(PYTHONDONTWRITEBYTECODE="1"),  # else a cut .pyc stays behind for everybody
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    first = next(line for line in done.stderr.splitlines() if line.startswith("error"))
    assert "rank 0 failed" in first and "No space left on device" in first and "metrics.jsonl" in first
    run = only_run(tmp_path)
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    assert [record["step"] for record in metrics(run)] == list(range(1, len(metrics(run)) + 1))
    assert (run / "metrics.jsonl").read_bytes().endswith(b"\n"), "no half line"
    assert list(run.rglob("*.tmp")) == []
    assert alive(tmp_path) == []


@pytest.mark.parametrize("mode", ["async", pytest.param("sync", marks=pytest.mark.whole)])
def test_a_rank_killed_while_saving_leaves_the_last_checkpoint_and_nothing_else(
    mode: str, text: str, tmp_path: Path
) -> None:
    saves = ["steps=6", "checkpoint.interval=2", *["checkpoint.async=false"] * (mode == "sync")]
    done = ppctl(*TRAIN, text, *saves, cwd=tmp_path, PPCTL_FAULT="save 1 2 -")
    assert done.returncode == 1
    doing = r"failed while saving" if mode == "sync" else r".*failed (in|while) .*"
    assert re.match(rf"error PP-E702: rank 1 {doing}: killed by signal 9 \(SIGKILL\)\n", done.stderr), done.stderr
    assert left_over(tmp_path) == []
    run = only_run(tmp_path)
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["latest", "step-2"]
    assert ppctl("resume", cwd=tmp_path).returncode == 0
    assert [record["step"] for record in metrics(run)] == list(range(1, 7))
    assert losses(run) == reference_losses(run, 6), "in the same cut; test_train_command.py: in another"


def test_a_run_goes_on_without_the_writer_that_somebody_killed(text: str, tmp_path: Path) -> None:
    """Every save is complete: the ranks write what lies in their memory, the one under way included."""
    saves = ["steps=6", "checkpoint.interval=2", "checkpoint.keep=0"]
    done = ppctl(*TRAIN, text, *saves, cwd=tmp_path, PPCTL_FAULT="writer 1 2 -")
    assert done.returncode == 0, done.stderr
    assert "warning: PP-E510: rank 0 has lost the checkpoint writer of" in done.stdout
    run = only_run(tmp_path)
    assert "warning: PP-E510: rank 1 has lost" in (run / "logs" / "rank-0001.log").read_text()
    for step in (2, 4, 6):
        assert f"saved step {step} (in the background, " in done.stdout
        assert verify(run / "checkpoints" / f"step-{step}").step == step
    assert not list((run / "checkpoints").glob("*.tmp"))
    assert losses(run) == reference_losses(run, 6)


@pytest.mark.whole
def test_a_full_disk_behind_a_step_ends_the_run_with_its_reason(text: str, tmp_path: Path) -> None:
    saves = ["steps=60", "checkpoint.interval=2"]
    done = ppctl(*TRAIN, text, *saves, cwd=tmp_path, PPCTL_FAULT="room 1 2 -")
    assert done.returncode == 1
    said = r"error PP-E505: rank [01] failed while saving: rank 1 could not write the checkpoint .*No space left"
    assert re.search(said, done.stderr), done.stderr
    checkpoints = only_run(tmp_path) / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step-2"]
    assert verify(checkpoints / "step-2").step == 2
    assert left_over(tmp_path) == []


def left_over(where: Path) -> list[int]:
    """Writers of checkpoints that still run in this directory after a moment."""
    deadline = time.monotonic() + 5
    while (left := alive(where, "ppctl.checkpoint.writer")) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def agent_of_two_ranks(text: str, where: Path) -> subprocess.Popen[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.Popen(
        [*torchrun, "-m", "ppctl", *TRAIN, text, "steps=100000"],
        cwd=where,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # hear it in a background job too
    )


def test_an_interrupted_torchrun_leaves_a_run_that_says_so(text: str, tmp_path: Path) -> None:
    agent = agent_of_two_ranks(text, tmp_path)
    try:
        assert agent.stdout is not None
        assert any(line.startswith("step") for line in agent.stdout)
        agent.send_signal(signal.SIGINT)
        agent.communicate(timeout=60)
    finally:
        agent.kill()
    status = json.loads((only_run(tmp_path) / "status.json").read_text())
    assert status["state"] == "interrupted"
    assert status["step"] >= 0
    assert alive(tmp_path) == []


def test_the_ranks_of_a_killed_torchrun_end(text: str, tmp_path: Path) -> None:
    agent = agent_of_two_ranks(text, tmp_path)
    try:
        assert agent.stdout is not None
        assert any(line.startswith("step") for line in agent.stdout)
        assert len(alive(tmp_path)) == 2
    finally:
        agent.kill()
    deadline = time.monotonic() + 5
    while alive(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = alive(tmp_path)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    agent.communicate()
    assert left == []
