"""How an agent has SLURM's job start again: which nodes are left out, and which process requeues it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable

from ppctl.agent import lives
from ppctl.agent.node import NodeAgent
from ppctl.launch import slurm
from ppctl.records.run_records import ASKED_WORDS
from ppctl.runs import fence
from ppctl.runs.heartbeat import host_name
from ppctl.runs.run_starts import slurm_job, slurm_start
from ppctl.runs.rundir import RunDir

_SCRIPT = 30
"""Seconds that the script of SLURM's job has to see a mark and to requeue."""


def absent(here: Iterable[str]) -> tuple[list[str], str]:
    """(the nodes of SLURM's job that are not `here`, ""): these are left out. But if they are half or more of at least
    three nodes, this one may have stood still: then ([], why none is left out)."""
    nodes = set(os.environ.get("PPCTL_NODES", "").split())
    gone = sorted(nodes.difference(here))
    if len(nodes) <= 2 or 2 * len(gone) < len(nodes):
        return gone, ""
    doubt = f"whether they or {host_name()} stood still cannot be told, so that none is left out"
    return [], f"; {len(gone)} of {len(nodes)} nodes are missing: {doubt}"


def requeue(run: RunDir, agent: NodeAgent | None, why: str, without: Iterable[str]) -> bool:
    """Have SLURM's job start again; False if its run is over or goes on without this process, which may have no `agent`
    yet. The script requeues when it sees the mark; if its node is lost, this process does, after `_SCRIPT` seconds."""
    start = slurm_start()
    status, finished = run.status(), run.result().get("state") == "finished"
    over = finished or "exit_code" in status or status.get("message") == ASKED_WORDS
    if start is None or over or fence.older(life := agent.start if agent else lives.before(run, submitted=True)):
        return False
    if run.requeue_mark(start) is None:
        run.write_requeue_mark(start, why, without)
    if agent is not None and agent.asked != signal.SIGTERM:  # by then ranks may have followed a request to save
        agent.asked = 0
    time.sleep(_SCRIPT + int(os.environ.get("SLURM_NODEID", 0)))  # one after the other: the first ends all
    # A signal meanwhile: the script lives and has decided, or somebody ends the job.
    told = (agent and agent.asked) or signal.sigpending()  # it may not listen yet
    more = int(start.rpartition(".")[2]) < run.read_config().launch.max_requeues
    if more and not told and fence.older(life) is None:
        slurm.requeue(slurm_job() or "", run.requeue_mark(start) or "")  # as the first agent wrote it
    return True
