"""`ppctl train -m`, whole: runs one after another, Ctrl-C, and the same command again."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest
from command import TINY, metrics, ppctl, start
from oracle.reference import reference_losses

pytestmark = pytest.mark.timeout(240)

TYPED = ("train", "-m", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", "optim.lr=1e-3,3e-3")


def made(cwd: Path) -> list[Path]:
    return sorted(path.parent for path in cwd.glob("runs/quickstart/*/config.yaml"))


def test_two_runs_are_those_of_one_process_and_are_compared(tmp_path: Path) -> None:
    done = ppctl(*TYPED, "steps=3", cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    runs = made(tmp_path)
    assert len(runs) == 2
    for run in runs:
        assert [record["loss"] for record in metrics(run)] == reference_losses(run, 3)
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("run ")] == ["run 1 of 2: lr=0.001", "run 2 of 2: lr=0.003"]
    assert [line.split()[:2] for line in lines if line.startswith("optim.lr")] == [["optim.lr", "0.001"]]
    again = ppctl(*TYPED, "steps=3", "--json", cwd=tmp_path)
    told = json.loads(again.stdout)
    assert (told["state"], [run["state"] for run in told["runs"]]) == ("finished", ["finished"] * 2)
    assert [run["run"] for run in told["runs"]] == list(map(str, runs)), "nothing was trained again"


@pytest.mark.whole
def test_ctrl_c_saves_the_present_run_and_the_same_command_goes_on(tmp_path: Path) -> None:
    typed = (*TYPED, "steps=150")
    process = start(*typed, cwd=tmp_path)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(list(tmp_path.glob("runs/quickstart/*/metrics.jsonl"))) < 2:
        time.sleep(0.05)
    while time.monotonic() < deadline and len(metrics(made(tmp_path)[1])) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "1 of 2 runs have finished; go on with" in err and "train -m +recipe=quickstart" in err
    assert "run 2 of 2" in out
    second = made(tmp_path)[1]
    stopped = len(metrics(second))
    assert stopped < 150
    done = ppctl(*typed, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (
        f"{second.name} on cpu, from step-{stopped}" in done.stdout
        and f"{made(tmp_path)[0].name}: finished" in done.stdout
    )
    assert len(made(tmp_path)) == 2
    assert [record["loss"] for record in metrics(second)] == reference_losses(second, 150)


@pytest.mark.whole
def test_a_run_that_fails_does_not_keep_the_next_from_its_turn(tmp_path: Path) -> None:
    done = ppctl(*TYPED[:-1], "optim.lr=1e18,1e-3", "steps=6", "optim.clip_grad=0", cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert "PP-E73" in done.stderr and "1 of 2 runs have finished" in done.stderr
    states = [json.loads((run / "status.json").read_text())["state"] for run in made(tmp_path)]
    assert states == ["failed", "finished"]
