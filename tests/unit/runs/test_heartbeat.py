"""Heartbeats: written without a system call, read from outside, gone at the end."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from ppctl.runs import heartbeat
from ppctl.runs.heartbeat import HeartbeatFile, Publisher


def test_what_a_rank_enters_is_read_by_others(tmp_path: Path) -> None:
    own = HeartbeatFile(tmp_path, 3)
    assert heartbeat.read(tmp_path, 3) is not None
    own.set_state("training")
    own.step = 41
    before = time.monotonic()
    own.enter(17)
    beat = heartbeat.read(tmp_path, 3)
    assert beat is not None
    assert (beat.rank, beat.pid, beat.state, beat.step, beat.index) == (3, os.getpid(), "training", 41, 17)
    assert before <= beat.since <= time.monotonic()
    own.set_state("saving")
    beat = heartbeat.read(tmp_path, 3)
    assert beat is not None
    assert (beat.state, beat.step, beat.index) == ("saving", 41, heartbeat.NO_ACTION)
    assert beat.exchanges == (0, 0, 0, 0)
    for axis in ("cp", "tp", "cp"):
        own.exchange(axis)
    beat = heartbeat.read(tmp_path, 3)
    assert beat is not None
    assert beat.exchanges == (1, 2, 0, 0) and beat.state == "saving"


def test_a_record_that_nobody_made_or_that_is_damaged_is_none(tmp_path: Path) -> None:
    assert heartbeat.read(tmp_path, 0) is None
    heartbeat.create(tmp_path, 0)
    (record,) = tmp_path.iterdir()
    whole = record.read_bytes()
    for damaged in (b"short", whole + b"x", b"another" + whole[7:], whole[:24] + b"\x7f" * 8 + whole[32:]):
        record.write_bytes(damaged)
        assert heartbeat.read(tmp_path, 0) is None


def test_a_ranks_record_replaces_the_launchers_and_outlives_the_rank(tmp_path: Path) -> None:
    heartbeat.create(tmp_path, 0)
    program = (
        "import os, signal, sys; from pathlib import Path; from ppctl.runs.heartbeat import HeartbeatFile\n"
        "beat = HeartbeatFile(Path(sys.argv[1]), 0); beat.step = 5; beat.enter(2); os.kill(os.getpid(), signal.SIGKILL)"
    )
    beat = heartbeat.read(tmp_path, 0)
    assert beat is not None and beat.pid == 0
    killed = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)])
    killed.wait()
    beat = heartbeat.read(tmp_path, 0)
    assert beat is not None and (beat.pid, beat.step, beat.index) == (killed.pid, 5, 2)


@pytest.mark.skipif(subprocess.run(["which", "strace"], capture_output=True).returncode != 0, reason="needs strace")
def test_an_action_costs_no_system_call(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from ppctl.runs.heartbeat import HeartbeatFile\n"
        "beat = HeartbeatFile(Path(sys.argv[1]), 0); beat.enter(0); os.getppid()\n"
        "for index in range(1000): beat.enter(index)\n"
        "os.getppid(); beat.close()"
    )
    log = tmp_path / "calls"
    traced = ["strace", "-o", str(log), sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(traced, capture_output=True, text=True)
    if "ptrace" in done.stderr and done.returncode:
        pytest.skip("this machine forbids strace")
    calls = log.read_text().splitlines()
    marks = [n for n, call in enumerate(calls) if call.startswith("getppid()")]
    between = [call for call in calls[marks[-2] + 1 : marks[-1]] if not call.startswith(("brk", "mmap", "munmap"))]
    assert between == []


def test_the_publisher_writes_at_once_when_asked_and_at_the_end(tmp_path: Path) -> None:
    written: list[tuple[str, Mapping[str, Any]]] = []
    first = threading.Event()

    def write(host: str, record: Mapping[str, Any]) -> None:
        written.append((host, record))
        first.set()

    beats = [HeartbeatFile(tmp_path, rank) for rank in (4, 5)]
    publisher = Publisher(tmp_path, [4, 5, 6], write)
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


def test_the_publisher_comes_again_and_survives_a_full_disk(tmp_path: Path) -> None:
    calls = 0
    enough = threading.Event()

    def write(host: str, record: Mapping[str, Any]) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            enough.set()
        raise OSError(28, "No space left on device")

    publisher = Publisher(tmp_path, [0], write, every=0.01)
    publisher.start()
    assert enough.wait(5)
    publisher.stop()


def test_slurms_node_name_is_the_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    assert heartbeat.host_name() == "node7"
