"""Several hosts on this machine: `ppctl node` for each, told apart by SLURM's name of a node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from command import TINY, alive, free_port, start
from networks import Networks

TRAIN = ("+recipe=quickstart", *TINY, "pp=4", "vpp=1", "nodes=2", "gpus_per_node=2", "checkpoint.interval=2")
AGENT = "ppctl.agent"


class Hosts:
    """Hosts called node-0, node-1 and so on; node-0 has the rendezvous. `cwd` is a disk that they share; without
    `apart` their network is this machine's."""

    def __init__(
        self, cwd: Path, *arguments: str, hosts: Sequence[int] = (0, 1), apart: Networks | None = None, **more: str
    ) -> None:
        self.cwd, self._more, self._apart, self.port = cwd, more, apart, free_port()
        self.address = f"{apart.address(0) if apart else '127.0.0.1'}:{self.port}"
        self.agents: dict[int, subprocess.Popen[str]] = {}
        for number in hosts:
            self.start(number, *(arguments if number == 0 else ()))

    def start(self, number: int, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """Start the agent of a host; node-0's must listen before others come, since all are on one machine."""
        name = {"SLURMD_NODENAME": f"node-{number}"}
        if self._apart:
            name |= {"GLOO_SOCKET_IFNAME": "eth0"}
        within = self._apart.within(number) if self._apart else ()
        words = ("node", "--rendezvous", self.address, *arguments)
        agent = start(*words, cwd=self.cwd, within=within, **name, **self._more, **more)
        self.agents[number] = agent
        if number == 0:
            until(lambda: agent.poll() is not None or self._listens(agent.pid))
        return agent

    def _listens(self, agent: int) -> bool:
        """Whether somebody listens at the rendezvous' port, in the network of the agent's process."""
        return f":{self.port:04X} 00000000:0000 0A " in Path(f"/proc/{agent}/net/tcp").read_text()

    def ranks(self, number: int) -> list[int]:
        """The processes of a host's ranks, in the order of ranks."""
        return [pid for rank, pid in self._processes(number) if rank is not None]

    def waiting(self, number: int) -> set[int]:
        """The processes of a host that wait to become ranks."""
        return {pid for rank, pid in self._processes(number) if rank is None}

    def _processes(self, number: int) -> list[tuple[int | None, int]]:
        """(rank, process) on a host: whose stderr is a rank's log has become that rank."""
        found: list[tuple[int | None, int]] = []
        for pid in alive(self.cwd):
            with suppress(OSError):
                if f"SLURMD_NODENAME=node-{number}\0" in Path(f"/proc/{pid}/environ").read_text():
                    log = re.search(r"/rank-(\d+)\.log", os.readlink(f"/proc/{pid}/fd/2"))
                    found.append((log and int(log[1]), pid))
        return sorted(found, key=lambda each: each[0] or 0)

    def steps(self) -> int:
        """How many records metrics.jsonl has."""
        return max((sum(1 for _ in open(path)) for path in self.cwd.glob("runs/*/*/metrics.jsonl")), default=0)

    def wait_for_step(self, step: int) -> None:
        until(lambda: self.steps() >= step or any(agent.poll() is not None for agent in self.agents.values()), 180)
        assert self.steps() >= step, self.said()

    def said(self) -> str:
        """All that agents said, once they have ended; those that still run are killed."""
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
        return "\n".join(f"--- node-{n}: {''.join(agent.communicate())}" for n, agent in self.agents.items())

    def ends(self, timeout: float = 200) -> dict[int, int]:
        """Wait until all agents have ended, and no process is left; their exit codes."""
        until(lambda: all(agent.poll() is not None for agent in self.agents.values()), timeout)
        assert all(agent.poll() is not None for agent in self.agents.values()), self.said()
        until(lambda: not alive(self.cwd), 20)
        assert not alive(self.cwd) and not alive(self.cwd, "ppctl.checkpoint.writer")
        return {number: agent.returncode for number, agent in self.agents.items()}


def kill(pids: Sequence[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def until(condition: Callable[[], object], timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
