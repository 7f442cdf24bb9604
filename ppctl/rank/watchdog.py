"""No rank waits for ever: its own alarm, and on every node one look at whether the job still moves.

Knows what to do when nothing has moved for too long: tell who is waited for, let every rank write its stack, end them.
Must not know how that is judged (`ppctl.hang`). Where ppctl's own launcher watches, it comes first: these are for ranks
that others started, and for a launcher's death.
"""

from __future__ import annotations

import faulthandler
import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import takewhile
from typing import Any, NoReturn

from ppctl.hang.limits import GRACE, Limits, Progress
from ppctl.hang.verdict import verdict
from ppctl.hang.waits import published
from ppctl.plan import Plan
from ppctl.rundir import RunDir

_STACKS = 1.0
_VERDICT = "verdict"
"""Key of a node's record: why the job ends, in one line. What else is in a record is `ppctl.heartbeat`'s."""


def write_stacks_on_request() -> None:
    """From now on SIGUSR2 writes every thread's stack to stderr, also out of a C call that holds the GIL.

    What else was to follow on SIGUSR2 follows then.
    """
    faulthandler.register(signal.SIGUSR2, all_threads=True, chain=True)


class Alarm:
    """A rank's own: unless it is set again in time, stacks are written and the process ends, whoever holds the GIL."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._steps = 0

    def set(self, state: str) -> None:
        """The rank begins something: `training` is one step."""
        self._steps += state == "training"
        first = self._steps < 3 or state != "training" or self.limits.step is None
        allowed = self.limits.longest if first else self.limits.step
        faulthandler.dump_traceback_later(max(allowed or 0.0, 1.0) + GRACE, exit=True)

    def off(self) -> None:
        """All is done."""
        faulthandler.cancel_dump_traceback_later()


class NodeWatch:
    """Hand it to the publisher as what writes a node's records: it writes them, and looks whether the job still moves.

    One node judges: the first, in the order of ranks, that has not fallen silent. It reads what all nodes have
    published; every other node reads the judge's record alone, so that a shared file system sees as many files opened
    as there are nodes, and not their square. When nothing has moved for too long the judge writes the culprit's error
    record and says so in its own record, and every node lets its ranks write their stacks and ends them, its own
    process last. Until the ranks have met (`meet`) every node judges its own ranks only.
    """

    def __init__(self, run: RunDir, plan: Plan, limits: Limits, first_step: int = 0) -> None:
        self.run = run
        self.plan = plan
        self.limits = limits
        self.progress = Progress(limits, time.time(), first_step)
        self._hosts: tuple[str, ...] = ()
        self._began = self._met = time.time()

    def meet(self, hosts: Sequence[str]) -> None:
        """From now on the nodes of the job are known, in the order of their first ranks."""
        self._met = time.time()
        self._hosts = tuple(hosts)

    def __call__(self, host: str, record: Mapping[str, Any]) -> None:
        """Write what a node publishes, then look. The clock is the hosts' own: seconds since the epoch."""
        try:
            self.run.write_heartbeats(host, record)
        finally:
            judge = self._judge_before(host, record)
            if judge is None:
                self._judge(host, record)
            elif _VERDICT in judge:
                self._leave(str(judge[_VERDICT]), record, wait=0.0)

    def _judge_before(self, host: str, record: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The record of the node that judges this one; None where this node is the judge itself.

        A node that takes another one for silent by mistake reads more than it must, and concludes nothing else.
        """
        now = time.time()
        own = published({host: record}, now, math.inf)
        self.progress.note(own)
        silence = self.progress.limit(own) / 2
        for name in takewhile(lambda name: name != host, self._hosts):
            told = self.run.heartbeat(name)
            if float(told.get("time", 0.0)) <= self._began:  # nothing, or what an earlier life of the run has left
                told = {"time": self._met}
            if _VERDICT in told or now - float(told["time"]) <= silence:
                return told
        return None

    def _judge(self, host: str, record: Mapping[str, Any]) -> None:
        hosts = (self.run.heartbeats() if self._hosts else {}) | {host: dict(record)}
        now = time.time()
        standings = published(hosts, now, math.inf)
        still = self.progress.late(standings, now)
        if still is None:
            return
        ages = {name: now - float(told.get("time", now)) for name, told in hosts.items()}
        silent = [name for name, age in ages.items() if age > still / 2 and name != host]
        error = verdict(self.plan, published(hosts, now, still / 2), still, now)
        where = next(standing.host for standing in standings if standing.rank == error["rank"])
        error |= {"time": now, "host": where}
        doing = f"rank {error['rank']}" + (f" in {error['action']}" if error["action"] else "")
        told = f"error {error['code']}: {doing}: {error['message']}"
        self._ask_for_other_nodes(silent, told)
        with suppress(OSError):
            if not self.run.errors():
                self.run.write_error(int(str(error["rank"])), error)
                self.run.write_status("failed", rank=error["rank"])
        with suppress(OSError):
            self.run.write_heartbeats(host, {**record, "time": now, _VERDICT: told})
        # Other nodes have time to look: their ranks would die of this node's broken connections before they can tell.
        self._leave(f"{told}\n{error['place']}", record, wait=self.limits.look if len(hosts) > 1 else 0.0)

    def _ask_for_other_nodes(self, silent: Sequence[str], why: str) -> None:
        """Where whole nodes have fallen silent, let SLURM's job be requeued without them."""
        job, life = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
        if silent and job is not None and self.run.job().get("job") is not None:
            with suppress(OSError):
                self.run.write_requeue_mark(job, int(life), why, exclude=silent)

    def _leave(self, why: str, record: Mapping[str, Any], wait: float) -> NoReturn:
        print(why, file=sys.stderr)
        sys.stderr.flush()
        _end([int(row["pid"]) for row in record.get("ranks", ())], wait)


def _end(processes: Sequence[int], wait: float) -> NoReturn:
    """Let this node's ranks tell where they are, then end them after `wait` more seconds, this process last."""
    ranks = [pid for pid in processes if pid != 0]
    others = [pid for pid in ranks if pid != os.getpid()]
    for each, number, pause in ((ranks, signal.SIGUSR2, _STACKS + wait), (others, signal.SIGKILL, 0.0)):
        for pid in each:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        time.sleep(pause)
    os._exit(1)
