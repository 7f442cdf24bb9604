"""Ends a job that hangs: each rank has an alarm, on every node one rank watches the job, and a hang leaves traces.

`ppctl.hang` judges whether nothing has moved for too long, and names the rank that all others wait for. ppctl's own
launcher watches with shorter limits than the alarms; `NodeWatch` is for ranks of other launchers.

SIGUSR2 asks a rank for its traces. gloo and NCCL have a flight recorder each (variables as in torch 2.13; older names
count as well), and each dump is a file. gloo records collectives but no single messages, which the pipeline's channels
are on a CPU. NCCL's record has not been seen yet.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NoReturn

from ppctl.hang.progress import GRACE, Limits, Progress
from ppctl.hang.verdict import published_states, verdict
from ppctl.plan import Plan
from ppctl.rank.own_process import Listener
from ppctl.runs import fence
from ppctl.runs.rundir import RunDir

_STACKS = 1.0
_VERDICT = "verdict"
"""Key of a node's record: why the job ends, in one line. What else is in a record is `ppctl.runs.heartbeat`'s."""


class Alarm:
    """Writes stacks and ends the process unless the rank goes on in time, whichever thread holds the GIL."""

    def __init__(self, limits: Limits, since: Callable[[], float]) -> None:
        """`since()` is when the rank began what it does: when this changes, it has gone on, and the alarm begins anew.
        It raises ValueError at the rank's end."""
        self.limits = limits
        self._since = since
        self._steps = 0
        self._seconds = 0.0
        self._lock = threading.Lock()
        threading.Thread(target=self._follow, name="alarm", daemon=True).start()

    def set(self, state: str) -> None:
        """Set the alarm for the state that the rank enters; `training` is one step."""
        self._steps += state == "training"
        first = self._steps < 3 or state != "training" or self.limits.step is None
        allowed = self.limits.longest if first else self.limits.step
        with self._lock:
            self._seconds = max(allowed or 0.0, 1.0) + GRACE
            faulthandler.dump_traceback_later(self._seconds, exit=True)

    def off(self) -> None:
        """Cancel the alarm."""
        with self._lock:
            self._seconds = 0.0
            faulthandler.cancel_dump_traceback_later()

    def _follow(self) -> None:
        seen = 0.0
        with suppress(ValueError):
            while True:
                time.sleep(self.limits.look)
                with self._lock:
                    if self._seconds and seen != (seen := self._since()):
                        faulthandler.dump_traceback_later(self._seconds, exit=True)


class NodeWatch:
    """The publisher's `write`: it writes a node's record, and checks whether the job still moves.

    One node judges: the first, in the order of ranks, that still publishes. It reads the records of all nodes; every
    other node reads only the judge's record, so that the number of files opened on a shared file system grows with the
    nodes, not their square. When nothing has moved for too long, the judge writes the culprit's failure, and its
    verdict into its own record; then every node lets its ranks write their stacks and ends them, its own process last.
    Until the ranks have met (`meet`) every node judges its own ranks only.
    """

    def __init__(self, run: RunDir, plan: Plan, limits: Limits, first_step: int = 0) -> None:
        self.run = run
        self.plan = plan
        self.limits = limits
        self.progress = Progress(limits, time.time(), first_step)
        self._hosts: tuple[str, ...] = ()
        self._began = self._met = time.time()

    def meet(self, hosts: Sequence[str]) -> None:
        """The ranks have met: these are the nodes of the job, in the order of their first ranks."""
        self._met = time.time()
        self._hosts = tuple(hosts)

    def __call__(self, host: str, record: Mapping[str, Any]) -> None:
        """Write this node's record, then check. The clock is the hosts' own: seconds since the epoch."""
        if (older := fence.older()) is not None:
            self._leave(f"error {older}", record, wait=0.0)
        try:
            self.run.write_heartbeats(host, record)
        finally:
            judge = self._judge_before(host, record)
            if judge is None:
                self._judge(host, record)
            elif _VERDICT in judge:
                self._leave(str(judge[_VERDICT]), record, wait=0.0)

    def _judge_before(self, host: str, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The record of the judge; None if this node is the judge. A node that wrongly takes another for silent only
        reads more files than it must."""
        now = time.time()
        own = published_states({host: record}, now, math.inf)
        self.progress.note(own)
        silence = self.progress.limit(own) / 2
        for name in takewhile(lambda name: name != host, self._hosts):
            theirs = self.run.heartbeat(name)
            if not self._is_new(theirs):
                theirs = {"time": self._met}
            if _VERDICT in theirs or now - float(theirs["time"]) <= silence:
                return theirs
        return None

    def _is_new(self, record: Mapping[str, Any]) -> bool:
        """Whether a host's record is there, and none of an earlier start."""
        return float(record.get("time", 0.0)) > self._began

    def _judge(self, host: str, record: Mapping[str, Any]) -> None:
        """Judge the job from what its hosts published: if nothing has moved for too long, write the verdict and leave.
        The record that carries the verdict is published before this node's ranks are ended."""
        published = {name: self.run.heartbeat(name) for name in self._hosts if name != host}
        hosts = {name: theirs for name, theirs in published.items() if self._is_new(theirs)} | {host: dict(record)}
        now = time.time()
        states = published_states(hosts, now, math.inf)
        still = self.progress.late(states, now)
        if still is None:
            return
        failure = verdict(self.plan, published_states(hosts, now, still / 2), still, now)
        action = f" in {failure.action}" if failure.action else ""
        why = f"error {failure.code}: rank {failure.rank}{action}: {failure.message}"
        with suppress(OSError):
            if not self.run.errors():
                self.run.write_error(failure)
                self.run.write_status("failed", rank=failure.rank)
        with suppress(OSError):
            self.run.write_heartbeats(host, {**record, "time": now, _VERDICT: why})
        # Wait until the other nodes have read the verdict: else their ranks fail by broken connections to this node.
        self._leave(f"{why}\n{failure.place}", record, wait=self.limits.look if len(hosts) > 1 else 0.0)

    def _leave(self, why: str, record: Mapping[str, Any], wait: float) -> NoReturn:
        print(why, file=sys.stderr)
        sys.stderr.flush()
        _end([int(row["pid"]) for row in record.get("ranks", ())], wait)


def _end(processes: Sequence[int], wait: float) -> NoReturn:
    """Let this node's ranks write their stacks, then end them after `wait` more seconds, this process last."""
    ranks = [pid for pid in processes if pid != 0]
    _signal(ranks, signal.SIGUSR2)
    time.sleep(_STACKS + wait)
    _signal([pid for pid in ranks if pid != os.getpid()], signal.SIGKILL)
    os._exit(1)


def _signal(processes: Sequence[int], number: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


_ENTRIES = "2000"
_NAMES = {"gloo": "_dump_fr_trace", "nccl": "_dump_nccl_trace"}
"""Private functions of torch; nothing else depends on them. NCCL's is in builds with NCCL alone."""

Dump = Callable[[bool, bool], bytes]
"""(with collectives, with stacks) -> a pickle of plain lists."""


def dump_on_request(run: RunDir, rank: int, listener: Listener) -> None:
    """From now on SIGUSR2 writes stacks to this rank's log and flight records into the run. Call it before the first
    process group is made."""
    turn_on_recorders(run)
    listener.on(signal.SIGUSR2, lambda: write_records(run, rank, recorders()))
    write_stacks_on_request()


def write_stacks_on_request() -> None:
    """From now on SIGUSR2 writes every thread's stack to stderr, also out of a C call that holds the GIL, and then
    calls the handler that SIGUSR2 had before."""
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=True)


def turn_on_recorders(run: RunDir) -> None:
    """Set the variables with which torch records in this process, and NCCL's own watchdog writes into the run."""
    prefix = str(run.flight_record("nccl", 0)).removesuffix("0")  # NCCL's watchdog appends the rank
    for names, value in (
        (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), _ENTRIES),
        (("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"), prefix),
        (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
    ):
        # The newest name alone: torch warns of the older name in every rank's log.
        os.environ.setdefault(names[0], next((os.environ[name] for name in names if name in os.environ), value))


def recorders() -> dict[str, Dump]:
    """The dump function of each recorder that this build of torch has, by backend; without NCCL's on the CPU."""
    import torch
    from torch._C import _distributed_c10d

    # A build for CUDA would write an empty record on the CPU.
    names = _NAMES if torch.cuda.is_initialized() else {"gloo": _NAMES["gloo"]}
    dumps = {backend: getattr(_distributed_c10d, name, None) for backend, name in names.items()}
    return {backend: dump for backend, dump in dumps.items() if dump is not None}


def write_records(run: RunDir, rank: int, dumps: Mapping[str, Dump]) -> None:
    """Write the record of each recorder, without stacks, which take seconds to format; gloo's comes first: NCCL's may
    have to wait for a thread that does not move."""
    for backend, dump in dumps.items():
        with suppress(OSError, RuntimeError):
            run.write_flight_record(backend, rank, dump(True, False))
