"""A host's agent: starts, watches and ends the host's ranks, one life after another.

torch's SimpleElasticAgent has the loop: rendezvous, start, monitor; end and again when ranks fail or an agent goes. Its
four methods for processes are here. What happens:

    a rank fails               its agent ends the host's ranks and meets the others anew, who see that within a second
    with exit code 2, 3 or 4   another life would repeat it: all agents end
    an agent or its host goes  the others notice within `LOST` seconds, end their ranks and meet anew
    a signal to leave          all ranks of the job save and leave; a second ends them; without ranks the agent leaves.
                               In SLURM's job it waits for ranks and tells them; there and in pods a second ends nothing

Ranks are ended by SIGKILL: SIGTERM would ask them to agree with other hosts on a last step and to save.
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from threading import Thread
from types import FrameType
from typing import Any, ClassVar, cast

from torch.distributed.elastic.agent.server.api import RunResult, SimpleElasticAgent, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import WorkerState as State
from torch.distributed.elastic.rendezvous import RendezvousClosedError

from ppctl.agent import lives
from ppctl.agent.rendezvous import LOST, NodeRendezvous, StandsStillError
from ppctl.config.quantities import seconds
from ppctl.errors import Problem, visible
from ppctl.hang.progress import time_to_leave
from ppctl.host.processes import HANDED_OVER
from ppctl.launch.environment import default_variables, rank_variables
from ppctl.launch.outcome import FINAL, INTERRUPTED, Exit, failures
from ppctl.launch.process import LAST_LINES, Standby, copy_lines, writer_to
from ppctl.rank.rendezvous import SharedRun
from ppctl.reach.store import SealedStore
from ppctl.runs import fence
from ppctl.runs.heartbeat import host_name
from ppctl.runs.run_starts import SECRET, slurm_start

ASKS = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
_LOOK, _LOOK_LOADED = 0.1, 5.0
_KILLED = 30.0
"""Seconds that killed ranks have to be gone: a driver may take long."""


class NodeAgent(SimpleElasticAgent):
    """One host's agent. The lives of its `job` are `job.1`, `job.2` and so on; `address` is where this host reaches the
    store, whose values the run's secret proves. Make it and call `run` in the main thread: `run` raises
    RendezvousClosedError when the job ends early, and SystemExit if this agent leaves alone."""

    before = ""  # `lives.before`, as this process began
    _standbys: ClassVar[list[Standby]] = []  # of this process, in which one agent may follow another

    def __init__(
        self,
        shared: SharedRun,
        job: str,
        address: tuple[str, int],
        store: SealedStore,
        rendezvous: NodeRendezvous,
        *,
        submitted: bool,
    ) -> None:
        size, most = shared.plan.sizes.world // rendezvous.settings.max_nodes, sys.maxsize  # `lives.begin` counts
        spec = WorkerSpec("rank", size, rendezvous, entrypoint="ppctl", max_restarts=most, monitor_interval=_LOOK)
        super().__init__(spec, exit_barrier_timeout=2 * LOST)
        self.run_dir, self._plan, self.launch, self.job = shared.run, shared.plan, shared.config.launch, job
        self.rendezvous, self.store, self.asked, self._deadline, self.life = rendezvous, store, 0, math.inf, ""
        self.address = address
        self._submitted, self.in_slurm = submitted, submitted and slurm_start() is not None
        if self.in_slurm and rendezvous.shrink == "wait":
            rendezvous.shrink = "requeue"
        self.in_pod = submitted and not self.in_slurm
        rendezvous.nobody_comes, rendezvous.all_come = self.in_slurm, self.in_pod
        self._ranks: list[Standby] = []
        self._environment, self._next_look = default_variables() | dict(os.environ) | self.launch.env, math.inf
        self._output: Thread | None = None
        for number in ASKS:
            signal.signal(number, self._on_signal)

    @property
    def start(self) -> str:
        """The start that `fence.older` compares: the agent's life, or `before` until it has one."""
        return self.life or self.before

    def follow(self, last: NodeAgent) -> None:
        """Take over from `last`, the agent of the job before, in whose store the others have begun this job: its last
        life counts until this job's first one, and a request to save that it got holds for this agent."""
        self.life, self.before = fence.latest(last.life, last.job, last.run_dir.path), last.before
        self.asked = self.asked or last.asked
        self.rendezvous.follow()

    # torch's methods for processes

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._prepare(worker_group.spec.local_world_size)  # ranks import while agents wait for each other
        super()._rendezvous(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        """Begin the life and start the ranks; none if an agent has gone. Raises RendezvousClosedError."""
        self._ranks, run = [], self.run_dir
        start = self._begin(worker_group)
        for worker in worker_group.workers if start else ():
            rank = worker.global_rank
            self._prepare(1)
            self._ranks.append(self._standbys.pop(0))
            arguments = ["--join"] if rank else ["--publish", str(run.path)]
            self._ranks[-1].become(rank, arguments, self._variables(start, rank, worker.local_rank), run.log(rank))
        self._ask(self._ranks)
        self._next_look = time.monotonic() + _LOOK_LOADED
        if self._ranks and self._ranks[0].stdout is not None:
            self._output = copy_lines(self._ranks[0].stdout, writer_to(sys.stdout))
        return {local: rank.rank for local, rank in enumerate(self._ranks)}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of this host's ranks; also writes their failures. Raises RendezvousClosedError and SystemExit."""
        codes, run = {rank.rank: rank.poll() for rank in self._ranks}, self.run_dir
        if self.rendezvous.is_closed() or time.monotonic() > self._deadline:
            raise RendezvousClosedError
        if codes and not any(codes.values()):
            if time.monotonic() > self._next_look:
                loaded = "start_up" in run.status()
                with suppress(OSError):  # the next life asks again
                    self._prepare(len(codes) * loaded, nice=10)  # while ranks train
                self._next_look = math.inf if loaded else time.monotonic() + _LOOK_LOADED
            return RunResult(State.HEALTHY if None in codes.values() else State.SUCCEEDED, codes)
        if run.result():  # written when all ranks had done their work
            return RunResult(State.SUCCEEDED, codes)
        exits = [Exit(rank, code, time.time(), ended=False) for rank, code in codes.items() if code]
        for failure in failures(exits, []) if fence.older(self.start) is None else ():
            if not run.has_error(failure.rank):
                with suppress(OSError):  # on a full disk its log has the reason
                    run.write_error(failure)
        final = any(code in FINAL for code in codes.values())
        if self.asked and self.in_pod and not final:
            raise SystemExit(128 + self.asked)  # the others go on
        if final or (self.asked and not self.in_slurm):  # there the next life saves and leaves
            raise RendezvousClosedError(*["failed"] * final)
        return RunResult(State.FAILED)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()
        if worker_group.group_rank == 0 and fence.older(self.start) is None:
            with suppress(OSError):  # on a full disk the next life's ranks tell
                self.run_dir.write_status("starting")  # the run has not failed, as its ranks may have written

    def _shutdown(self, death_sig: signal.Signals = signal.SIGKILL, timeout: int = 30) -> None:
        """Kill this host's ranks, and wait until they are gone. Raises SystemExit if some remain: the host is lost."""
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
            problem = Problem("PP-E659", f"{named} cannot be killed: this host takes no further part")
            print(f"error {problem}", file=sys.stderr)
            raise SystemExit(128 + signal.SIGKILL)  # in a pod: let another be made

    # One life

    def _begin(self, group: WorkerGroup) -> str:
        """The name of the life that all agents of this rendezvous begin together: its number and a random word; empty
        if an agent has gone. Raises RendezvousClosedError if another life is not worth it, and StandsStillError."""
        store = copy(self.store)
        store.plain = cast(Any, group.store)  # of this rendezvous alone
        store.set(f"node/{group.group_rank}", host_name())
        until = time.monotonic() + (limit := seconds(self.launch.start_limit))
        if group.group_rank == 0:
            nodes = [self._value(store, f"node/{each}", each, until) for each in range(group.group_world_size or 0)]
            if "" not in nodes:
                number, word = self.store.plain.add("ppctl/lives", 1), f"-{secrets.token_hex(4)}"
                self.life = fence.latest(self.life, self.job, self.run_dir.path)
                over = fence.older(self.start) is not None  # the run goes on elsewhere
                most = self.launch.max_restarts
                why = None if over else lives.begin(self.run_dir, self.job, number, nodes, most, word)
                store.set("life", None if why is None else f"{number}{word}")
                if why:
                    told = f"note: start {number} on {', '.join(nodes)}: {why}"
                    print(visible(told), file=sys.stderr, flush=True)
        start = self._value(store, "life", 0, until + limit)  # the first waits for others' names before
        if start is None:
            raise RendezvousClosedError("failed")
        return str(start)

    def _value(self, store: SealedStore, key: str, group_rank: int, until: float) -> Any:
        """The value of `key`, which agent `group_rank` sets, once it is there; empty if an agent has gone. Never waits
        in the store: signs of life go there. Raises StandsStillError at `until`, at least `launch.start_limit` away."""
        while not store.plain.check([key]):
            if self.rendezvous.num_nodes_waiting():
                return ""
            if time.monotonic() > until:
                raise StandsStillError(self.rendezvous.host_of(group_rank), seconds(self.launch.start_limit))
            time.sleep(_LOOK)
        return store.get(key)

    def _prepare(self, count: int, nice: int = 0) -> None:
        """Have `count` processes wait to become ranks; replace those that have ended or have another environment."""
        for other in (each for each in self._standbys if each.environment != self._environment):
            other.send_to_group(signal.SIGKILL)
        fit = [each for each in self._standbys if each.environment == self._environment and each.poll() is None]
        # What a handler raises in a callback of fork is lost, and the agent would stay.
        signal.pthread_sigmask(signal.SIG_BLOCK, ASKS)
        try:
            self._standbys[:] = [*fit, *(Standby(self._environment, nice) for _ in range(count - len(fit)))]
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ASKS)

    def _variables(self, start: str, rank: int, local: int) -> Mapping[str, str]:
        (host, port), name, size = self.address, f"{self.job}.{start}", self._worker_group.spec.local_world_size
        own = rank_variables(rank, local, size * self.rendezvous.settings.max_nodes, size)
        own |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "PPCTL_START": start}
        own |= {"TORCHELASTIC_RUN_ID": self.run_dir.id, "TORCHELASTIC_USE_AGENT_STORE": str(True)}
        own |= {SECRET: self.store.key_for(name).hex() or "none", **fence.variables(name, self.run_dir.path)}
        self.life = own[fence.LIFE]
        return own | {HANDED_OVER: str(time.monotonic())}

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        alive = [rank for rank in self._ranks if rank.returncode is None]
        # SLURM signals all agents and all ranks, some twice. It, or a cluster, ends what does not leave in time.
        stays = self._submitted and (alive or self.in_slurm)
        if not stays and (not alive or self.asked):
            by_hand = not self._submitted and number != signal.SIGTERM
            raise SystemExit(INTERRUPTED if by_hand else 128 + number)  # as `ppctl train`
        self.asked = number if number == signal.SIGTERM and not alive else self.asked or number
        if number == signal.SIGINT:
            print("\nsaving after this step, then stopping; Ctrl-C once more ends at once", file=sys.stderr)
        elif not self._submitted:
            self._deadline = time.monotonic() + time_to_leave(self._plan, self.run_dir.metrics_file(last=1000).read())
        self._ask(alive)

    def _ask(self, ranks: Sequence[Standby]) -> None:
        """Let these ranks save and leave, if this agent was asked to."""
        for rank in ranks if self.asked else ():
            rank.send(signal.SIGUSR1 if self.asked == signal.SIGUSR1 else signal.SIGTERM)
