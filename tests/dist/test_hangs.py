"""Ranks that raise, die, stop or hold the GIL at random actions: the job ends in time, and the right one is named."""

from __future__ import annotations

import pickle
import random
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
from command import TINY, environment, only_run, start
from test_faults import alive

from ppctl.rundir import RunDir

KINDS = ("raise", "kill", "stop", "hold")
CODES = {"raise": "PP-E701", "kill": "PP-E702", "stop": "PP-E706", "hold": "PP-E706"}
AT_ONCE = 4
LIMIT = 4
DEADLINE = 200
"""Seconds for a batch, imports on a busy machine included."""


class Fault(NamedTuple):
    kind: str
    pp: int
    rank: int
    step: int
    action: str


def drawn(seed: int) -> Fault:
    draw = random.Random(seed)
    pp = draw.choice([2, 3])
    rank = draw.randrange(pp)
    return Fault(KINDS[seed % 4], pp, rank, draw.randint(2, 4), f"{rank}{draw.choice('FB')}{draw.randrange(6)}")


def begin(fault: Fault, where: Path) -> subprocess.Popen[str]:
    (where / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    limits = (f"launch.step_limit={LIMIT}s", "launch.first_step_limit=60s")
    return start(
        *("train", "+recipe=quickstart", *TINY, f"pp={fault.pp}", "vpp=1", "data.path=corpus.txt", "steps=100000"),
        *limits,
        cwd=where,
        PPCTL_FAULT=f"{fault.kind} {fault.rank} {fault.step} {fault.action}",
    )


def batches(first: int, last: int) -> list[list[int]]:
    return [list(range(seed, seed + AT_ONCE)) for seed in range(first, last, AT_ONCE)]


@pytest.mark.timeout(DEADLINE + 60)
@pytest.mark.parametrize(
    "seeds",
    [*batches(0, 12), *(pytest.param(seeds, marks=pytest.mark.whole) for seeds in batches(12, 400))],
    ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}",
)
def test_the_culprit_is_named_and_nobody_stays(seeds: list[int], tmp_path: Path) -> None:
    running = []
    for seed in seeds:
        where = tmp_path / str(seed)
        where.mkdir()
        running.append((drawn(seed), where, begin(drawn(seed), where)))
    deadline = time.monotonic() + DEADLINE
    for fault, where, process in running:
        out, err = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        first = next((line for line in err.splitlines() if line.startswith("error")), out + err)
        assert process.returncode == 1, (fault, err)
        named = f"error {CODES[fault.kind]}: rank {fault.rank} (stage {fault.rank}) failed in {fault.action}: "
        assert first.startswith(named), (fault, err)
        assert alive(where) == []
        run = RunDir(only_run(where))
        if fault.kind == "hold":
            assert re.search(r"most recent call first", run.log(fault.rank).read_text()), "its stack"
        if CODES[fault.kind] == "PP-E706":
            told = {int(path.name.rpartition("_")[2]): pickle.loads(path.read_bytes()) for path in run.flight_records()}
            assert set(told) == set(range(fault.pp)) - {fault.rank}, "those that could still write"
            assert all(record["entries"] for record in told.values()), "the step's gather at least"
            assert "flight_recorder_rank_" in err


@pytest.mark.timeout(200)
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.whole), 1])
def test_ranks_that_others_started_watch_each_other(rank: int, tmp_path: Path) -> None:
    """Held by a call that keeps the GIL: rank 0 watches rank 1; rank 0's own alarm ends it where it is the one."""
    (tmp_path / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    train = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", "data.path=corpus.txt", "steps=100000")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "ppctl"]
    done = subprocess.run(
        [*command, *train, "launch.step_limit=4s", "launch.first_step_limit=12s"],
        cwd=tmp_path,
        env=environment(PPCTL_FAULT=f"hold {rank} 4 {rank}B2", PPCTL_ALARM_GRACE="20"),
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 1
    assert alive(tmp_path) == []
    if rank == 1:
        assert "error PP-E706: rank 1 in 1B2: nothing has moved for" in done.stderr
        run = RunDir(only_run(tmp_path))
        assert [error["rank"] for error in run.errors()] == [1]
        assert run.flight_records() == [run.flight_record(0)]
    else:
        assert "in _strike" in done.stderr, "its own stack"
