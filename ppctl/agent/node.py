"""A host's agent: starts, watches and ends the host's ranks, one life after another.

torch's SimpleElasticAgent has the loop: rendezvous, start, monitor; end and again when ranks fail or an agent goes. Its
four methods for processes are here. What happens:

    a rank fails               its agent ends the host's ranks and meets the others anew, who see that within a second
    with exit code 2, 3 or 4   another life would repeat it: all agents end
    an agent or its host goes  the others notice within `LOST` seconds, end their ranks and meet anew
    a signal to leave          all ranks of the job save and leave; once more ends them; without ranks the agent leaves

Ranks are ended by SIGKILL: SIGTERM would ask them to agree with other hosts on a last step and to save.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Thread
from types import FrameType
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State

from ppctl.agent import lives
from ppctl.agent.rendezvous import LOST, NodeRendezvous
from ppctl.config.launch_config import LaunchConfig
from ppctl.host.processes import python
from ppctl.launch.environment import default_variables, rank_variables
from ppctl.launch.outcome import Exit, failures
from ppctl.launch.process import LAST_LINES, RankProcess, copy_lines, writer_to
from ppctl.reach.store import SealedStore
from ppctl.runs import fence
from ppctl.runs.heartbeat import host_name
from ppctl.runs.run_starts import SECRET
from ppctl.runs.rundir import RunDir

_FINAL = (2, 3, 4)
_KILLED = 30.0
"""Seconds that killed ranks have to be gone: a driver may take long to give back what they had pinned."""
_STOP_GRACE = 60.0
"""Seconds that ranks have to save and leave when they were asked to."""
_LOOK = 0.1
_TO_LEAVE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


class JobOver(Exception):
    """The job ends here, on all agents."""


class Left(BaseException):
    """This agent leaves: it was asked to by the signal `number`, or (0) its host cannot run ranks any more."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True, slots=True)
class Job:
    """The job of a run, whose lives are `id.1`, `id.2` and so on. `address`: where this host reaches the store."""

    run: RunDir
    launch: LaunchConfig
    id: str
    nodes: int
    ranks_per_node: int
    address: tuple[str, int]


class NodeAgent(SimpleElasticAgent):
    """One host's agent. `store` proves by the run's secret. Make it, and call `run`, in the main thread."""

    def __init__(self, job: Job, store: SealedStore, rendezvous: NodeRendezvous) -> None:
        size, most = job.ranks_per_node, sys.maxsize  # `lives.begin` counts restarts for all agents together
        spec = WorkerSpec("rank", size, rendezvous, entrypoint="ppctl", max_restarts=most, monitor_interval=_LOOK)
        super().__init__(spec, exit_barrier_timeout=2 * LOST)
        self.job, self.rendezvous, self.asked, self._sealed, self._deadline = job, rendezvous, 0, store, math.inf
        self._ranks: list[RankProcess] = []
        self._output: Thread | None = None
        for number in _TO_LEAVE:
            signal.signal(number, self._on_signal)

    # torch's methods for processes

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Begin the life and start the ranks; none if an agent has gone. Raises JobOver."""
        self._ranks, run = [], self.job.run
        number = self._begin(worker_group)
        # What comes before a rank listens is kept for it.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1))
        try:
            for worker in worker_group.workers if number else ():
                rank = worker.global_rank
                command = [*python("ppctl.rank.worker"), *(["--join"] if rank else ["--publish", str(run.path)])]
                variables = self._variables(number, rank, worker.local_rank)
                self._ranks.append(RankProcess(rank, command, variables, run.log(rank), piped=rank == 0))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        if self._ranks and self._ranks[0].stdout is not None:
            self._output = copy_lines(self._ranks[0].stdout, writer_to(sys.stdout))
        return {local: rank.rank for local, rank in enumerate(self._ranks)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """How this host's ranks are, after writing the failures of those that could not. Raises JobOver."""
        codes, run = {rank.rank: rank.poll() for rank in self._ranks}, self.job.run
        if self.rendezvous.is_closed() or time.monotonic() > self._deadline:
            raise JobOver
        if codes and not any(codes.values()):
            return RunResult(State.HEALTHY if None in codes.values() else State.SUCCEEDED, codes)
        if run.result():  # written when all ranks had done their work
            return RunResult(State.SUCCEEDED, codes)
        exits = [Exit(rank, code, time.time(), ended=False) for rank, code in codes.items() if code]
        for failure in failures(exits, []):
            if not run.has_error(failure.rank):
                run.write_error(failure)
        if self.asked or any(code in _FINAL for code in codes.values()):
            raise JobOver
        return RunResult(State.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()
        if worker_group.group_rank == 0:
            self.job.run.write_status("starting")  # the run has not failed, as its ranks may have written

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        """Kill this host's ranks, and wait until they are gone. Raises Left naming what remains: the host is lost."""
        deadline = time.monotonic() + _KILLED
        for rank in self._ranks:
            rank.send_to_group(signal.SIGKILL)
        while (alive := [rank for rank in self._ranks if rank.poll() is None]) and time.monotonic() < deadline:
            time.sleep(0.02)
        if self._output is not None:
            self._output.join(LAST_LINES)
        self._ranks, self._output = [], None
        if alive:
            named = f"ranks {', '.join(str(rank.rank) for rank in alive)} on {host_name()}"
            print(f"error PP-E659: {named} cannot be killed: this host takes no further part", file=sys.stderr)
            raise Left(0)

    # One life

    def _begin(self, group: WorkerGroup) -> int:
        """The number of the life that all agents of this rendezvous begin together; 0 if one of them has gone. Raises
        JobOver if another life is not worth it."""
        job, store = self.job, self._sealed.beside(group.store)
        store.set(f"node/{group.group_rank}", host_name())
        if group.group_rank == 0:
            nodes = [self._value(store, f"node/{each}") for each in range(job.nodes)]
            number = self._sealed.plain.add("ppctl/lives", 1)
            if None not in nodes:
                why = lives.begin(job.run, job.id, number, nodes, job.launch.max_restarts)
                store.set("life", -1 if why is None else number)
                if why:
                    print(f"note: start {number} on {', '.join(nodes)}: {why}", file=sys.stderr, flush=True)
        number = self._value(store, "life") or 0
        if number < 0:
            raise JobOver
        return int(number)

    def _value(self, store: SealedStore, key: str) -> Any:
        """The value once it is there; None if an agent has gone. Never waits in the store: signs of life go there."""
        while not store.plain.check([key]):
            if self.rendezvous.num_nodes_waiting():
                return None
            time.sleep(_LOOK)
        return store.get(key)

    def _variables(self, number: int, rank: int, local: int) -> Mapping[str, str]:
        job, (host, port), name = self.job, self.job.address, f"{self.job.id}.{number}"
        own = rank_variables(rank, local, job.nodes * job.ranks_per_node, job.ranks_per_node)
        own |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "PPCTL_START": str(number)}
        own |= {"TORCHELASTIC_RUN_ID": job.run.id, "TORCHELASTIC_USE_AGENT_STORE": str(True)}
        own |= {SECRET: self._sealed.key_for(name).hex() or "none", **fence.variables(name, job.run.path)}
        return default_variables() | dict(os.environ) | job.launch.env | own

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        alive = [rank for rank in self._ranks if rank.returncode is None]
        if not alive or self.asked:
            raise Left(number)
        self.asked = number
        if number == signal.SIGINT:
            print("\nsaving after this step, then stopping; Ctrl-C once more ends at once", file=sys.stderr, flush=True)
        else:
            self._deadline = time.monotonic() + _STOP_GRACE
        for rank in alive:
            rank.send(signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM)
