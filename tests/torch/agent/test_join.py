"""How a host joins: what the first one has to prove, and how long it may take for an answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from command import free_port
from torch._C._distributed_c10d import TCPStore

from ppctl.agent import job
from ppctl.agent.rendezvous import NodeRendezvous
from ppctl.errors import TrainingError
from ppctl.launch.planning import planned
from ppctl.reach import store
from ppctl.reach.store import SealedStore, limit_answers, listen_as
from ppctl.runs.run_starts import write_secret
from ppctl.runs.rundir import RunDir

RUN = ("recipe=quickstart", "launch.device=cpu", "nodes=2", "gpus_per_node=1", "pp=2", "vpp=1")


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    port = free_port()
    for name, value in {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": "", "PPCTL_START": ""}.items():
        monkeypatch.setenv(name, value)
    return port


@pytest.fixture
def served(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[SealedStore]:
    """The store of a run's first host, with all that it tells others; nobody answers them."""
    composed, plan, problems = planned(RUN)
    assert plan is not None and not problems
    run = RunDir(tmp_path)
    run.write_plan(plan)
    run.write_config(composed.config)
    write_secret(run)
    monkeypatch.setattr(NodeRendezvous, "answer", NodeRendezvous.answer)
    listening = listen_as("127.0.0.1", port)
    yield job._serve("127.0.0.1", port, "", str(tmp_path), str(listening.detach()))[0]


def test_a_host_joins_the_start_that_proves_its_word(served: SealedStore, port: int, tmp_path: Path) -> None:
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.05):
            NodeRendezvous.answer()

    looks = threading.Thread(target=look)
    looks.start()
    try:
        for _ in range(2):
            assert job._join("127.0.0.1", port, "", "")[1].run.path == tmp_path
    finally:
        ended.set()
        looks.join()


def test_a_host_that_died_before_its_word_keeps_no_later_one_out(served: SealedStore, port: int) -> None:
    served.plain.add("ppctl/asked", 1)
    NodeRendezvous.answer()
    served.plain.add("ppctl/asked", 1)
    served.plain.set("ppctl/asked/2", "word")
    NodeRendezvous.answer()
    assert served.get("ppctl/asked/2/answer") == "word" and not served.plain.check(["ppctl/asked/1/answer"])
    served.plain.set("ppctl/asked/1", "late")
    NodeRendezvous.answer()
    assert served.get("ppctl/asked/1/answer") == "late"


def test_a_count_that_a_stranger_raised_keeps_the_agent_only_a_moment(served: SealedStore) -> None:
    number = served.plain.add("ppctl/asked", 10**12)
    served.plain.set(f"ppctl/asked/{number}", "word")
    NodeRendezvous.answer()
    assert served.get(f"ppctl/asked/{number}/answer") == "word"


def test_a_limit_for_answers_leaves_no_descriptor_open(port: int, tmp_path: Path) -> None:
    with (tmp_path / "file").open("w"):
        before = len(os.listdir("/dev/fd"))
        limit_answers(port, timedelta(seconds=1))
        assert len(os.listdir("/dev/fd")) == before


def test_what_a_run_has_said_before_it_was_killed_takes_no_host_in(
    served: SealedStore, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its secret is still there, and a stranger plays back all that was in its store."""
    monkeypatch.setattr(job, "JOIN", timedelta(seconds=1))
    with pytest.raises(TrainingError, match="PP-E708"):
        job._join("127.0.0.1", port, "", "")
    served.set("ppctl/asked/2/answer", "0" * 32)
    with pytest.raises(TrainingError, match="PP-E776"):
        job._join("127.0.0.1", port, "", "")


@pytest.mark.parametrize("who", ["a host", "a rank"])
def test_a_listener_that_never_answers_is_not_waited_for(port: int, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's program may have the port."""
    monkeypatch.setattr(store, "_MORE", 0.2)
    monkeypatch.setattr(job, "JOIN", timedelta(seconds=0.5))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    listening = listen_as("127.0.0.1", port)
    try:
        with pytest.raises(TrainingError, match="PP-E708"):
            job._join("127.0.0.1", port, "", "") if who == "a host" else store.connect(1, 2, timedelta(seconds=0.5))
    finally:
        listening.close()


SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), None, True, wait_for_workers=False)
store.set("key", "value")
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("question", ["get", "compare_set", "add", "check"])
def test_a_store_that_stands_still_is_not_waited_for(port: int, question: str) -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"ready\n"
        limit = timedelta(seconds=1)
        store = TCPStore("127.0.0.1", port, None, False, limit, False)
        limit_answers(port, limit)
        asks = {"get": ["key"], "compare_set": ["key", "value", "other"], "add": ["count", 1], "check": [["key"]]}
        getattr(store, question)(*asks[question])
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.3)
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            getattr(store, question)(*asks[question])
        assert time.monotonic() - began < 10
    finally:
        server.kill()
        server.wait()
