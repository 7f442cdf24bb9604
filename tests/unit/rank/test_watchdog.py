"""Who watches whom where no launcher of ours does: few files are opened, and every node ends whoever has gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from unit_plan import plan

from ppctl.hang.progress import GRACE, Limits
from ppctl.host.private_files import own_directory, shared_memory
from ppctl.rank import watchdog
from ppctl.rank.watchdog import Alarm, NodeWatch
from ppctl.records.rank_records import RankFailure
from ppctl.runs.heartbeat import HeartbeatFile
from ppctl.runs.rundir import RunDir

HOSTS = ("a", "b", "c")
LIMIT = 3.0
_opened: list[str] | None = None


def _audit(event: str, arguments: tuple) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str) and arguments[0].endswith(".json"):
        _opened.append(arguments[0])


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """The files that are opened to be read or replaced in a run, as Python's own audit tells."""
    global _opened
    if _opened is None:
        sys.addaudithook(_audit)  # there is no way to take one out again
    _opened = []
    yield _opened
    _opened = []


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    def fill(draft: RunDir) -> None:
        draft.write_plan(plan(pp=3, gbs=12, mbs=1))

    return RunDir.create(tmp_path, "watched", fill)


def node(number: int, age: float = 0.0) -> tuple[str, dict]:
    """What a node with one rank publishes, which is in the middle of a step."""
    now = time.time() - age
    row = {"rank": number, "pid": 0, "state": "training", "step": 3, "index": 5, "working": True, "since": now}
    return f"node{number}", {"host": f"node{number}", "time": now, "ranks": [row | {"stopped": False}]}


@pytest.mark.parametrize("silent", [0, 1, 3])
def test_a_look_of_all_nodes_opens_as_many_files_as_there_are_nodes(
    silent: int, tmp_path: Path, opened: list[str]
) -> None:
    """256 nodes, of which the first few have fallen silent: 256 x 256 files every ten seconds held up the others."""
    count, limits = 256, Limits(start=60.0, first_step=60.0, step=60.0)
    shared = RunDir.create(tmp_path, "large", lambda draft: None)
    made = plan(pp=16, dp=16, gbs=512, mbs=1)
    watches = [NodeWatch(shared, made, limits) for _ in range(count)]
    for number, watch in enumerate(watches):
        watch(*node(number, age=40.0 if number < silent else 0.0))
    assert opened == [], "who has not met the others looks at itself alone"
    for watch in watches:
        watch._began -= 100.0
        watch.meet([f"node{number}" for number in range(count)])
    for number, watch in enumerate(watches[silent:], silent):
        watch(*node(number))
    assert count <= len(opened) <= (2 + silent) * count
    assert shared.errors() == []


def test_the_alarm_begins_anew_whenever_the_rank_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step and an evaluation of many actions may take longer than the limit, which is one without progress."""
    set_to = list[float]()
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback_later", lambda seconds, exit: set_to.append(seconds))

    def comes_to(count: int) -> bool:
        for _ in range(500 * (len(set_to) < count)):
            time.sleep(0.01)
            if len(set_to) >= count:
                break
        time.sleep(0.03)
        return len(set_to) == count

    with own_directory(shared_memory()) as directory:
        beat = HeartbeatFile(directory, 0)
        alarm = Alarm(Limits(start=60.0, first_step=60.0, step=0.04), beat.since)
        assert comes_to(0), "no state has begun"
        for _ in range(3):
            alarm.set("training")
        assert comes_to(4) and set_to == [60.0 + GRACE] * 2 + [1.0 + GRACE] * 2
        for count in (5, 6):
            beat.work(1)
            assert comes_to(count) and set_to[-1] == 1.0 + GRACE
        alarm.off()
        beat.work(2)
        assert comes_to(6)
        beat.close()


def start(run: RunDir, hosts: tuple[str, ...] = HOSTS) -> list[subprocess.Popen[str]]:
    """Nodes that watch each other, and whose ranks stand still: all for rank 0."""
    script = Path(__file__).parents[2] / "helpers" / "watched_node.py"
    environment = os.environ | {"LIMIT": str(LIMIT), "DIRECTORY": str(run.path.parents[1])}
    command = [sys.executable, str(script), str(run.path)]
    nodes = [
        subprocess.Popen(
            [*command, str(rank), ",".join(hosts)],
            env=environment,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(len(hosts))
    ]
    for each in nodes:
        assert each.stdout is not None
        assert each.stdout.readline() == "ready\n"
    for each in nodes:
        assert each.stdin is not None
        each.stdin.write("begin\n")
        each.stdin.flush()
    return nodes


def end(nodes: list[subprocess.Popen[str]]) -> None:
    for each in nodes:
        each.kill()
        each.communicate()


@pytest.mark.parametrize(
    ("stopped", "judge", "culprits"),
    [((), 0, {0}), ((2,), 0, {2}), ((0,), 1, {0}), ((0, 1), 2, {0, 1})],
    ids=["all hang", "the last is lost", "the first is lost", "the first two are lost"],
)
def test_whoever_is_first_of_those_that_live_judges_and_all_that_live_leave(
    run: RunDir, stopped: tuple[int, ...], judge: int, culprits: set[int]
) -> None:
    nodes = start(run)
    try:
        while len(run.heartbeats()) < len(HOSTS):
            time.sleep(0.01)
        for rank in stopped:
            nodes[rank].send_signal(signal.SIGSTOP)
        living = [rank for rank in range(len(nodes)) if rank not in stopped]
        told = {rank: nodes[rank].communicate(timeout=60)[1] for rank in living}
        assert [nodes[rank].returncode for rank in living] == [1] * len(living)
        (error,) = run.errors()
        culprit = error.rank
        assert culprit in culprits
        assert (error.host, error.code) == (HOSTS[culprit], "PP-E706")
        assert ("does not answer" in error.message) == bool(stopped)
        for rank, text in told.items():
            assert f"error PP-E706: rank {culprit}" in text, "the same reason on every node"
            assert rank != judge or "\nrank 0: step 1" in text, "the table of all ranks where it was made"
            assert "most recent call first" in text, "the stack of the node's rank"
        assert [rank for rank in stopped if nodes[rank].poll() is not None] == []
    finally:
        end(nodes)


def test_a_judge_that_is_lost_behind_its_first_word_leaves_that_word_and_others_end_the_job(run: RunDir) -> None:
    """It has written the culprit's record, and not yet its own, from which the other nodes would have learnt it."""
    nodes = start(run)
    try:
        nodes[0].send_signal(signal.SIGSTOP)
        first = RankFailure(2, "told by the first judge", code="PP-E706")
        run.write_error(first)
        for rank in (1, 2):
            nodes[rank].communicate(timeout=60)
            assert nodes[rank].returncode == 1
        assert run.errors() == [first]
    finally:
        end(nodes)


def test_what_an_earlier_life_of_the_run_has_left_ends_nobody(run: RunDir) -> None:
    host, record = node(0, age=30.0)
    run.write_heartbeats("node0", {**record, "verdict": "error PP-E706: of a life that is over"})
    watch = NodeWatch(run, run.read_plan(), Limits(60.0, 60.0, 60.0))
    watch.meet(["node0", "node1"])
    watch(*node(1))  # would have ended this process
    assert run.errors() == []
    assert host == "node0"


def test_hosts_and_records_of_an_earlier_life_stretch_no_limit(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """node2 is not in the job any more, and node1 has published nothing yet."""
    for number in (1, 2):
        host, record = node(number, age=30.0)
        run.write_heartbeats(host, {**record, "ranks": [record["ranks"][0] | {"state": "starting"}]})
    watch, told = NodeWatch(run, run.read_plan(), Limits(start=60.0, first_step=5.0, step=5.0)), list[str]()
    watch.meet(["node0", "node1"])
    watch.progress._began -= 100.0
    monkeypatch.setattr(watch, "_leave", lambda why, *_, **__: told.append(why))
    host, record = node(0, age=10.0)
    watch(host, record | {"time": time.time()})
    assert len(told) == 1 and told[0].startswith("error PP-E706: rank 0")
