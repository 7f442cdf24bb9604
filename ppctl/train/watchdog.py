"""No rank waits for ever: its own alarm, and on every node one look at all ranks' records.

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
from typing import Any

from ppctl.hang.limits import GRACE, Limits, Progress
from ppctl.hang.verdict import verdict
from ppctl.hang.waits import published
from ppctl.plan import Plan
from ppctl.rundir import RunDir

_STACKS = 1.0


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
    """Hand it to the publisher as what writes a node's records: it writes them, and looks at everybody's.

    When nothing has moved for too long it writes the culprit's error record, lets this node's ranks write their stacks,
    and ends them, its own process last.
    """

    def __init__(self, run: RunDir, plan: Plan, limits: Limits, first_step: int = 0) -> None:
        self.run = run
        self.plan = plan
        self.progress = Progress(limits, time.time(), first_step)

    def __call__(self, host: str, record: Mapping[str, Any]) -> None:
        """Write what a node publishes, then judge. The clock is the hosts' own: seconds since the epoch."""
        try:
            self.run.write_heartbeats(host, record)
        finally:
            self._judge(host, record)

    def _judge(self, host: str, record: Mapping[str, Any]) -> None:
        hosts = self.run.heartbeats() | {host: dict(record)}
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
        print(f"{told}\n{error['place']}", file=sys.stderr)
        sys.stderr.flush()
        _end([int(row["pid"]) for row in record.get("ranks", ())])

    def _ask_for_other_nodes(self, silent: Sequence[str], why: str) -> None:
        """Where whole nodes have fallen silent, let SLURM's job be requeued without them."""
        job, life = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURM_RESTART_COUNT", "0")
        if silent and job is not None and self.run.job().get("job") is not None:
            with suppress(OSError):
                self.run.write_requeue_mark(job, int(life), why, exclude=silent)


def _end(processes: Sequence[int]) -> None:
    """Let this node's ranks tell where they are, then end them, this process last."""
    ranks = [pid for pid in processes if pid != 0]
    others = [pid for pid in ranks if pid != os.getpid()]
    for each, number, pause in ((ranks, signal.SIGUSR2, _STACKS), (others, signal.SIGKILL, 0.0)):
        for pid in each:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        time.sleep(pause)
    os._exit(1)
