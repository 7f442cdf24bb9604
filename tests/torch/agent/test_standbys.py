"""An agent's processes that wait to become ranks: which of them are kept, and what importing a rank's program does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import until

from ppctl.agent.node import NodeAgent
from ppctl.launch.process import Standby
from ppctl.rank.live_state import process_age

IMPORT = """
import os
read = set()
class Spy(dict):
    def __getitem__(self, name): read.add(name); return super().__getitem__(name)
    def get(self, name, default=None): read.add(name); return super().get(name, default)
    def __contains__(self, name): read.add(name); return super().__contains__(name)
os.environ._data, real = Spy(os.environ._data), os.environ._data
import torch
asked = []
torch._C._cuda_getDeviceCount = lambda: asked.append(1) or 0
import ppctl.rank.worker
links = [os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")]
assert not [link for link in links if link.startswith(("socket:", "/dev/nvidia"))], links
assert not asked and not torch.cuda.is_initialized()
print(*sorted(os.fsdecode(name) for name in read))
"""
OF_A_LIFE = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PPCTL_START"}
OF_A_LIFE |= {"TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "PPCTL_SECRET", "PPCTL_LIFE", "PPCTL_HANDED_OVER"}


@pytest.fixture
def agent() -> Iterator[NodeAgent]:
    """An agent without others; its processes end with the test."""
    made = NodeAgent.__new__(NodeAgent)
    made._environment = dict(os.environ)
    yield made
    kept = [*made._standbys]
    made._standbys.clear()
    for each in kept:
        end(each)


def end(process: Standby) -> None:
    process.send_to_group(9)
    until(lambda: process.poll() is not None, 30)


def test_importing_a_ranks_program_uses_no_gpu_no_socket_and_no_variable_of_a_life() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    read = set(done.stdout.split())
    assert "PPCTL_ALARM_GRACE" in read and not read & OF_A_LIFE


def test_those_that_live_and_have_the_environment_wait_on_and_others_are_replaced(agent: NodeAgent) -> None:
    agent._prepare(2)
    dead, alive = agent._standbys
    end(dead)
    agent._prepare(2)
    assert len(agent._standbys) == 2 and agent._standbys[0] is alive and dead not in agent._standbys
    agent._prepare(1)
    assert len(agent._standbys) == 2, "more than are needed wait on"
    agent._environment = agent._environment | {"MORE": "1"}
    agent._prepare(1)
    (other,) = agent._standbys
    assert other.environment["MORE"] == "1"
    assert other is not alive
    until(lambda: alive.poll() is not None, 30)
    assert alive.poll() == -9


def test_one_that_has_just_died_is_a_rank_that_has_died(agent: NodeAgent, tmp_path: Path) -> None:
    agent._prepare(1)
    (process,) = agent._standbys
    os.kill(process._popen.pid, 9)
    time.sleep(0.5)  # and nobody has looked
    process.become(3, ["--join"], {"RANK": "3"}, tmp_path / "log")
    assert (process.rank, process.poll()) == (3, -9)


def test_the_age_of_a_rank_counts_from_its_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    time.sleep(0.1)
    monkeypatch.setenv("PPCTL_HANDED_OVER", str(time.monotonic()))
    assert 0 <= process_age() < 0.1
