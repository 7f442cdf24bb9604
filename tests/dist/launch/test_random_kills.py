"""Kills of whole runs at random moments: of the launcher, a rank, the writer, all; now and then of the restart, too."""

from __future__ import annotations

import random
import subprocess
import time
from pathlib import Path

import pytest
from background_saves import PROGRAM, kill
from command import TINY, alive, losses, metrics, only_run, start
from oracle.reference import reference_losses
from verified import verify

from ppctl.runs.checkpoint_folder import find, step_of

STEPS, INTERVAL = 300, 5
WHOM = ("launcher", "rank", "writer, launcher", "all")


def strike(process: subprocess.Popen[str], whom: str, where: Path) -> None:
    ranks, writers = alive(where), alive(where, PROGRAM)
    if whom == "rank":
        kill(ranks[-1:] or [process.pid])
    elif whom == "all":
        kill([*writers, *ranks, process.pid])
    else:
        kill(writers * (whom != "launcher"))
        process.kill()


def ended(process: subprocess.Popen[str], where: Path) -> bool:
    """Whether launcher, ranks and writer have gone by themselves."""
    process.communicate(timeout=90)
    deadline = time.monotonic() + 60
    while (left := alive(where) + alive(where, PROGRAM)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not left


def steps_done(where: Path) -> int:
    return max((sum(1 for _ in open(path)) for path in where.glob("runs/*/*/metrics.jsonl")), default=0)


@pytest.mark.timeout(480)
@pytest.mark.parametrize(
    ("moments", "seed"),
    [pytest.param(2, 0, marks=pytest.mark.whole), *(pytest.param(10, seed, marks=pytest.mark.soak) for seed in (1, 2))],
)
def test_every_restart_goes_on_from_a_complete_checkpoint(tmp_path: Path, moments: int, seed: int) -> None:
    """Never back to step 0 or behind an earlier restart, and in the end the losses of a run that nobody killed."""
    draw, last, again, kills = random.Random(seed), 0, False, 0
    (tmp_path / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    train = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", f"data.path={tmp_path}/corpus.txt")
    process = start(*train, f"steps={STEPS}", f"checkpoint.interval={INTERVAL}", cwd=tmp_path)
    while kills < moments:
        if again:  # at whatever moment of its start
            time.sleep(draw.uniform(0, 4))
        else:
            goal = max(last + draw.randrange(1, 20), 2 * INTERVAL + 1)  # the first save is over
            while steps_done(tmp_path) <= goal and process.poll() is None:
                time.sleep(0.002)
        if process.poll() is not None:
            break
        whom = draw.choice(WHOM)
        strike(process, whom, tmp_path)
        kills += 1
        assert ended(process, tmp_path), "no process is left"
        found = find(only_run(tmp_path) / "checkpoints")
        step = 0 if found is None else verify(found.path).step
        assert found is None or (not found.warning and step_of(found.path) == step)
        told = steps_done(tmp_path)
        assert step >= last, "no restart lost what an earlier one had"
        assert told - step <= 2 * INTERVAL, f"{whom}: a save that was under way, and an interval"
        last, again = step, not again and draw.random() < 0.5
        process = start("resume", cwd=tmp_path)
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    run = only_run(tmp_path)
    assert kills == moments or kills > moments // 2
    assert [record["step"] for record in metrics(run)] == list(range(1, STEPS + 1))
    assert losses(run) == reference_losses(run, STEPS)
