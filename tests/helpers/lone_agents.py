"""Agents without torch's loop, for tests of when they begin lives and requeue."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch.distributed import HashStore

from ppctl.agent import lives
from ppctl.agent.node import NodeAgent
from ppctl.agent.rendezvous import CAME
from ppctl.config.schema import RunConfig
from ppctl.reach.store import SealedStore
from ppctl.runs import fence
from ppctl.runs.rundir import RunDir


class Agent(SimpleNamespace):
    """An agent without torch's loop."""

    start, follow = NodeAgent.start, NodeAgent.follow


def agent_of(run: RunDir, life: str = "") -> Any:
    told = fence.variables(life, run.path)[fence.LIFE] if life else ""
    before = lives.before(run, submitted=True)
    own = {"job": "j", "asked": 0, "in_slurm": True, "in_pod": False, "address": ("node-0", 29500)}
    return Agent(run_dir=run, life=told, before=before, launch=RunConfig().launch, **own)


def mark_of(run: RunDir) -> str | None:
    mark = run.path / "requeue.7.0"
    return mark.read_text() if mark.exists() else None


def store_of(*hosts: str) -> SealedStore:
    """The store of a job to which these hosts have come."""
    store = SealedStore(HashStore(), b"secret", "start")
    for number, name in enumerate(hosts, 1):
        store.plain.add(CAME, 1)
        store.set(f"{CAME}/{number}", name)
    return store
