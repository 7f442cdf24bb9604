"""Twelve kinds of trouble at random actions: a job that cannot go on ends in time, its culprit named; others go on."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
from command import STARTED, TINY, alive, environment, free_port, metrics, only_run, ppctl, start
from pairwise import pairwise

from ppctl.runs.rundir import RunDir

KINDS = ("raise", "kill", "stop", "hold", "slow", "deaf", "cut", "full", "dumb", "room", "nan", "update")
"""What strikes (tests/faults/sitecustomize.py)."""
AT_ONCE = 8
LIMIT = 4
DEADLINE = 240
"""Seconds for a run, imports on a busy machine included."""
RUNS = 100
"""Of each kind, in all tiers."""


class Fault(NamedTuple):
    kind: str
    pp: int
    rank: int
    peer: int
    """A neighbour of the rank."""
    step: int
    action: str

    @property
    def text(self) -> str:
        """As PPCTL_FAULT has it."""
        at = {"room": str(self.step - 1), "update": str(self.step)}.get(self.kind, str(self.step))
        kind = f"{self.kind}-{self.peer}" if self.kind in ("deaf", "cut") else self.kind
        return f"{kind} {self.rank} {at} {'-' if self.kind in ('room', 'nan', 'update') else self.action}"


def drawn(seed: int) -> Fault:
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    pp = draw.choice([2, 3])
    rank = {"full": 0, "nan": pp - 1}.get(kind, draw.randrange(pp))
    peer = draw.choice([each for each in (rank - 1, rank + 1) if 0 <= each < pp])
    return Fault(kind, pp, rank, peer, draw.randint(2, 4), f"{rank}{draw.choice('FBIW')}{draw.randrange(6)}")


def begin(fault: Fault, where: Path) -> subprocess.Popen[str]:
    (where / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    limits = (f"launch.step_limit={LIMIT}s", "launch.first_step_limit=60s")
    steps = fault.step + 3 if fault.kind in ("slow", "dumb") else 100000
    schedule = "zb_h1" if fault.action[1] in "IW" else "1f1b"
    return start(
        *("train", "+recipe=quickstart", *TINY, f"pp={fault.pp}", "vpp=1", "data.path=corpus.txt", f"steps={steps}"),
        f"pipeline.pp_schedule={schedule}",
        *(f"checkpoint.interval={2 if fault.kind == 'room' else 0}", *limits),
        cwd=where,
        PPCTL_FAULT=fault.text,
    )


def named(fault: Fault, first: str, code: str, what: str = "") -> None:
    assert first.startswith(f"error {code}: rank {fault.rank} (stage {fault.rank}) failed in {fault.action}: {what}")


def ended_by_its_culprit(fault: Fault, first: str, err: str, run: Path) -> None:
    """A rank raised, died, stands still, or computed what is no number: its action is told, or what it was doing."""
    if fault.kind == "update":
        assert first == f"error PP-E701: rank {fault.rank} failed while updating: ValueError: struck by a test"
        assert f"at step {fault.step}; its log: " in err
    elif fault.kind == "nan":
        assert first.startswith("error PP-E732: rank ") and f"is not finite on rank {fault.rank}" in first
    else:
        codes = {"raise": "PP-E701", "kill": "PP-E702", "stop": "PP-E706", "hold": "PP-E706"}
        named(fault, first, codes[fault.kind], "ValueError: struck by a test" if fault.kind == "raise" else "")
    if fault.kind == "hold":
        log = (run / "logs" / f"rank-{fault.rank:04d}.log").read_text()
        assert re.search(r"most recent call first", log), "its stack"
    if fault.kind in ("stop", "hold"):
        flights = {int(path.name.rpartition("_")[2]): path for path in RunDir(run).flight_records()}
        assert set(flights) == set(range(fault.pp)) - {fault.rank}, "those that could still write"
        records = [pickle.loads(path.read_bytes()) for path in flights.values()]
        assert all(record["entries"] for record in records), "the step's gather at least"
        assert "/errors/flight_recorder_*" in err


def ended_with_both_ends_named(fault: Fault, first: str, err: str, run: Path) -> None:
    """A connection that loses everything, or broke, while both of its ends are alive."""
    code, between = {
        "deaf": ("PP-E707", r"rank (\d) on \S+ does not reach rank (\d) on \S+: .* was sent but has not come"),
        "cut": (
            "PP-E711",
            r"the connection from rank (\d) on \S+ to rank (\d) on \S+ broke before any rank had",
        ),
    }[fault.kind]
    assert first.startswith(f"error {code}: rank ")
    found = re.search(between, err)
    assert found is not None
    assert {int(found[1]), int(found[2])} == {fault.rank, fault.peer}


def ended_for_want_of_room(fault: Fault, first: str, err: str, run: Path) -> None:
    """A full disk: who could not write what is told, and what was there before is whole."""
    if fault.kind == "full":
        assert first.startswith("error PP-E701: rank 0 failed while updating: OSError")
        assert "No space left on device" in first and "metrics.jsonl" in first
        kept = (run / "metrics.jsonl.kept").read_text().splitlines()
        assert [json.loads(line)["step"] for line in kept] == list(range(1, len(kept) + 1))
    else:
        saved = 2 * (fault.step - 2)
        what = f"rank {fault.rank} could not write the checkpoint {run / 'checkpoints' / f'step-{saved + 2}'}: "
        assert re.fullmatch(r"error PP-E505: rank \d failed while saving: " + re.escape(what) + ".*", first)
        left = {path.name for path in (run / "checkpoints").iterdir()}
        assert left == ({"latest", *(f"step-{step}" for step in range(2, saved + 1, 2))} if saved else set())


def went_on(fault: Fault, first: str, err: str, run: Path) -> None:
    """A slow rank and a log that cannot be written end no run; who is slow is on every step's line."""
    records = metrics(run)
    assert len(records) == fault.step + 3
    assert json.loads((run / "result.json").read_text())["state"] == "finished"
    if fault.kind == "slow":
        slow = records[fault.step :]
        assert [record["slowest_stage"] for record in slow] == [fault.rank] * 3
        assert [record["slowest_rank"] for record in slow] == [fault.rank] * 3
        shown = ppctl("status", cwd=run.parents[2]).stdout
        assert f"slowest stage of the last step: {fault.rank} (rank {fault.rank})" in shown


ENDINGS: dict[str, tuple[int, Callable[[Fault, str, str, Path], None]]] = {
    **dict.fromkeys(("raise", "kill", "stop", "hold", "nan", "update"), (1, ended_by_its_culprit)),
    **dict.fromkeys(("deaf", "cut"), (1, ended_with_both_ends_named)),
    **dict.fromkeys(("full", "room"), (1, ended_for_want_of_room)),
    **dict.fromkeys(("slow", "dumb"), (0, went_on)),
}


def note(fault: Fault, code: int, seconds: float, err: str) -> None:
    """Keep a line of every run in PPCTL_SOAK_LOG, where `make test-all` and `make soak` ask for it."""
    log = os.environ.get("PPCTL_SOAK_LOG")
    if log is not None:
        first = next((line for line in err.splitlines() if line.startswith("error")), "")
        with open(log, "a") as file:
            file.write(f"pp {fault.pp}, {fault.text}: exit code {code}, gone after {seconds:.0f} s; {first}\n")


def strike(fault: Fault, where: Path) -> None:
    """Run a job that meets its fault, and look at what it leaves."""
    where.mkdir()
    began, process = time.monotonic(), begin(fault, where)
    out, err = process.communicate(timeout=DEADLINE)
    code, check = ENDINGS[fault.kind]
    note(fault, process.returncode, time.monotonic() - began, err)
    assert process.returncode == code, (fault, out, err)
    assert alive(where) == []
    run = only_run(where)
    assert json.loads((run / "status.json").read_text())["state"] == ("failed" if code else "finished")
    assert list(run.rglob("*.tmp")) == []
    check(fault, next((line for line in err.splitlines() if line.startswith("error")), ""), err, run)


def rounds(seeds: list[int]) -> list[list[int]]:
    """Seeds of runs that one test starts: a few minutes' worth."""
    return [seeds[first : first + 2 * AT_ONCE] for first in range(0, len(seeds), 2 * AT_ONCE)]


def cases() -> list:
    """One fault of each kind in `make test`, every pair of kind, pp, rank, step and operation in `make test-all`.

    The former on two ranks, in a B, W, I and F in turn: one is killed in a W, one is stopped in an I.
    """
    seeds = range(RUNS * len(KINDS))
    one_of_each = [
        next(seed for seed in seeds[kind :: len(KINDS)] if (drawn(seed).pp, drawn(seed).action[1]) == (2, operation))
        for kind, operation in enumerate("BWIF" * 3)
    ]
    axes = {
        seed: (fault.kind, fault.pp, fault.rank, fault.step, fault.action[1])
        for seed in seeds
        for fault in [drawn(seed)]
    }
    first = {row: seed for seed, row in reversed(axes.items())}
    pairs = [first[row] for row in pairwise(first, map(axes.get, one_of_each)) if first[row] not in one_of_each]
    rest = [seed for seed in seeds if seed not in {*one_of_each, *pairs}]
    return [
        one_of_each,
        *(pytest.param(each, marks=pytest.mark.whole) for each in rounds(sorted(pairs))),
        *(pytest.param(each, marks=pytest.mark.soak) for each in rounds(rest)),
    ]


@pytest.mark.timeout(480)
@pytest.mark.parametrize("seeds", cases(), ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_the_culprit_is_named_and_nobody_stays(seeds: list[int], tmp_path: Path) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        struck = {seed: pool.submit(strike, drawn(seed), tmp_path / str(seed)) for seed in seeds}
    failed = {seed: error for seed, future in struck.items() if (error := future.exception()) is not None}
    assert not failed, "\n".join(f"seed {seed}, {drawn(seed).text}: {error}" for seed, error in failed.items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "axis", "sizes", "rank", "waiting"),
    [
        ("stall", "tp", ("tp=2", "pp=2"), 3, 2),
        pytest.param("stall", "cp", ("cp=2", "pp=2"), 0, 1, marks=pytest.mark.whole),
        pytest.param("stall", "ep", ("dp=2", "ep=2", "model.num_moe_experts=4"), 1, 0, marks=pytest.mark.whole),
        pytest.param("stall", "etp", ("tp=2", "sp=true", "model.num_moe_experts=4"), 0, 1, marks=pytest.mark.whole),
        pytest.param("deaf", "tp", ("tp=2", "pp=2"), 3, 2, marks=pytest.mark.whole),
        pytest.param("die", "tp", ("tp=2", "pp=2"), 0, 1, marks=pytest.mark.whole),
        pytest.param("die", "cp", ("cp=2",), 1, 0, marks=pytest.mark.whole),
    ],
)
def test_who_fails_within_an_exchange_is_named_with_its_axis(
    kind: str, axis: str, sizes: tuple[str, ...], rank: int, waiting: int, tmp_path: Path
) -> None:
    (tmp_path / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    stage = 1 if rank == 3 else 0
    told = {"stall": f"stall-{axis}", "die": f"die-{axis}", "deaf": f"deaf-{waiting}"}[kind]
    done = ppctl(
        *("train", "+recipe=quickstart", *TINY, "vpp=1", *sizes, "data.path=corpus.txt"),
        *("steps=100000", f"launch.step_limit={LIMIT}s", "launch.first_step_limit=60s", "checkpoint.interval=0"),
        cwd=tmp_path,
        timeout=DEADLINE,
        PPCTL_FAULT=f"{told} {rank} 3 {stage}F1",
    )
    assert done.returncode == 1
    first, *more = [line for line in done.stderr.splitlines() if not line.startswith("note")]
    if kind == "die":
        assert first.startswith(f"error PP-E702: rank {rank} (stage {stage}) failed in {stage}F1: killed by signal 9")
    elif kind == "deaf":
        assert re.search(rf"ranks \d on \S+ and \d on \S+ have all started the same collective along {axis}", first)
    else:
        assert first.startswith(f"error PP-E706: rank {rank} (stage {stage}) failed in {stage}F1: ")
        assert re.search(rf"rank {waiting} in an exchange along {axis}\b", first), done.stderr
        assert any(f"waits for rank {rank} in an exchange along {axis}" in line for line in more)
    assert alive(tmp_path) == []


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
        assert [error.rank for error in run.errors()] == [1]
        assert run.flight_records() == [run.flight_record("gloo", 0)]
    else:
        assert "in _strike" in done.stderr, "its own stack"


@pytest.mark.whole
@pytest.mark.timeout(200)
def test_where_the_first_node_has_fallen_silent_the_next_one_ends_the_job(tmp_path: Path) -> None:
    """Rank 0 holds the GIL, and with it the thread that judges the whole job: the second node takes its place."""
    (tmp_path / "corpus.txt").write_text("one stage hands its bubble to the next " * 200)
    train = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", "data.path=corpus.txt", "steps=100000")
    limits = ("launch.step_limit=4s", "launch.first_step_limit=12s")
    struck = {"PPCTL_FAULT": "hold 0 300 0B2", "PPCTL_ALARM_GRACE": "20"}  # late: its node has published by then
    port, agents = free_port(), []
    for node, name in enumerate(("first", "second")):
        where = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port))
        command = [sys.executable, "-m", "torch.distributed.run", *where, "--nproc-per-node", "1", "-m", "ppctl"]
        agent = subprocess.Popen(
            [*command, *train, *limits],
            cwd=tmp_path,
            env=environment(SLURMD_NODENAME=name, GLOO_SOCKET_IFNAME="lo", **struck),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        STARTED.append(agent)
        agents.append(agent)
    _, told = agents[1].communicate(timeout=150)
    assert agents[1].returncode != 0
    assert "error PP-E706: rank 0 in 0" in told
    assert "its host first does not answer" in told
    assert "in _strike" in agents[0].communicate(timeout=60)[1], "its own alarm"
    assert alive(tmp_path) == []
    run = RunDir(only_run(tmp_path))
    assert (run.errors()[0].rank, run.errors()[0].host) == (0, "first")
    assert run.flight_record("gloo", 1) in run.flight_records()
