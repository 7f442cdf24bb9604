"""Heartbeats: written without a system call, read from outside, gone at the end."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from ppctl import heartbeat
from ppctl.heartbeat import HeartbeatFile, Publisher


@pytest.fixture
def run_id(tmp_path: Path) -> Iterator[str]:
    name = f"test {os.getpid()}/{tmp_path.name}"
    yield name
    heartbeat.remove(name, range(8))


def test_what_a_rank_enters_is_read_by_others(run_id: str) -> None:
    own = HeartbeatFile(run_id, 3)
    assert heartbeat.read(run_id, 3) is not None
    own.set_state("training")
    own.step = 41
    before = time.monotonic()
    own.enter(17)
    beat = heartbeat.read(run_id, 3)
    assert beat is not None
    assert (beat.rank, beat.pid, beat.state, beat.step, beat.index) == (3, os.getpid(), "training", 41, 17)
    assert before <= beat.since <= time.monotonic()
    own.set_state("saving")
    beat = heartbeat.read(run_id, 3)
    assert beat is not None
    assert (beat.state, beat.step, beat.index) == ("saving", 41, heartbeat.NO_ACTION)
    assert beat.exchanges == (0, 0, 0, 0)
    for axis in ("cp", "tp", "cp"):
        own.exchange(axis)
    beat = heartbeat.read(run_id, 3)
    assert beat is not None
    assert beat.exchanges == (1, 2, 0, 0) and beat.state == "saving"


def test_a_record_that_nobody_made_is_none(run_id: str) -> None:
    assert heartbeat.read(run_id, 0) is None
    Path(heartbeat.create(run_id, 0, os.getpid())).write_bytes(b"short")
    assert heartbeat.read(run_id, 0) is None


def test_who_made_the_record_removes_it(run_id: str) -> None:
    HeartbeatFile(run_id, 0).close()
    assert heartbeat.read(run_id, 0) is None, "made by the rank itself"
    heartbeat.create(run_id, 0, owner=os.getppid())
    HeartbeatFile(run_id, 0).close()
    beat = heartbeat.read(run_id, 0)
    assert beat is not None and beat.pid == os.getpid(), "made by a launcher, which has yet to read it"


def test_a_killed_ranks_record_stays_and_is_swept_when_its_owner_is_gone(run_id: str) -> None:
    program = (
        "import os, signal, sys; from ppctl.heartbeat import HeartbeatFile\n"
        "beat = HeartbeatFile(sys.argv[1], 0); beat.step = 5; beat.enter(2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", program, run_id], check=False)
    beat = heartbeat.read(run_id, 0)
    assert beat is not None and (beat.step, beat.index) == (5, 2)
    mine = HeartbeatFile(run_id, 1)
    heartbeat.sweep()
    assert [beat.rank for beat in heartbeat.read_all(run_id, range(2))] == [1]
    mine.close()


@pytest.mark.skipif(subprocess.run(["which", "strace"], capture_output=True).returncode != 0, reason="needs strace")
def test_an_action_costs_no_system_call(run_id: str, tmp_path: Path) -> None:
    program = (
        "import os, sys; from ppctl.heartbeat import HeartbeatFile\n"
        "beat = HeartbeatFile(sys.argv[1], 0); beat.enter(0); os.getppid()\n"
        "for index in range(1000): beat.enter(index)\n"
        "os.getppid(); beat.close()"
    )
    log = tmp_path / "calls"
    traced = ["strace", "-o", str(log), sys.executable, "-c", program, run_id]
    done = subprocess.run(traced, capture_output=True, text=True)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip("this machine forbids strace")
    calls = log.read_text().splitlines()
    marks = [n for n, call in enumerate(calls) if call.startswith("getppid()")]
    between = [call for call in calls[marks[-2] + 1 : marks[-1]] if not call.startswith(("brk", "mmap", "munmap"))]
    assert between == []


def test_the_publisher_writes_at_once_when_asked_and_at_the_end(run_id: str) -> None:
    written: list[tuple[str, Mapping[str, Any]]] = []
    first = threading.Event()

    def write(host: str, record: Mapping[str, Any]) -> None:
        written.append((host, record))
        first.set()

    beats = [HeartbeatFile(run_id, rank) for rank in (4, 5)]
    publisher = Publisher(run_id, [4, 5, 6], write)
    assert publisher.every == 10.0
    publisher.start()
    assert first.wait(5)
    beats[0].enter(9)
    publisher.publish()
    publisher.stop()
    host, record = written[1]
    assert host == record["host"] == heartbeat.host_name()
    assert [(row["rank"], row["index"]) for row in record["ranks"]] == [(4, 9), (5, -1)]
    assert abs(record["ranks"][0]["since"] - time.time()) < 60, "on the wall clock"
    assert len(written) == 3


def test_the_publisher_comes_again_and_survives_a_full_disk(run_id: str) -> None:
    calls = 0
    enough = threading.Event()

    def write(host: str, record: Mapping[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            enough.set()
        raise OSError(28, "No space left on device")

    publisher = Publisher(run_id, [0], write, every=0.01)
    publisher.start()
    assert enough.wait(5)
    publisher.stop()


def test_slurms_node_name_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert heartbeat.host_name() == "node7"
