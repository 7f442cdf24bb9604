"""How ranks find each other and get the same run.

Knows the rank variables, the rendezvous store and what is in it. Must not know how a config was composed. Ranks of
ppctl's launcher read the run directory themselves; ranks of another launcher get config and plan from rank 0 through
the store, so that only logs and checkpoints need a shared file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, TrainingError, pasted
from ppctl.heartbeat import host_name
from ppctl.plan import Plan
from ppctl.rundir import RunDir

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

START_UP = timedelta(minutes=10)
"""How long a rank waits for rank 0 before it has the config, which has the run's own limit."""
_RUN = "ppctl/run"
_READERS = "ppctl/read"
_STARTS = "ppctl/starts"
_START = "PPCTL_START"
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LOOK = 0.5
"""Seconds between looks at the store, at most: 2,047 ranks ask it twice each."""


@dataclass(frozen=True, slots=True)
class OwnRank:
    """This process's place among the ranks, as its launcher has set it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> OwnRank:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE. Raises ConfigError naming what is missing."""
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            message = f"a worker is started by a launcher, which sets {', '.join(missing)}"
            raise ConfigError(Problem("PP-E740", message, "ppctl train +recipe=quickstart"))
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return cls(rank, int(os.environ.get("LOCAL_RANK", rank % local_world)), world, local_world)


@dataclass(frozen=True, slots=True)
class SharedRun:
    """The run that all ranks have: its directory, config and plan."""

    run: RunDir
    config: RunConfig
    plan: Plan

    @property
    def digest(self) -> str:
        """Of config and plan: equal on ranks that have the same run."""
        text = json.dumps(to_mapping(self.config), sort_keys=True) + self.plan.digest
        return hashlib.sha256(text.encode()).hexdigest()


def meet(own: OwnRank, patience: timedelta = START_UP) -> Store:
    """The store that all ranks share (MASTER_ADDR, MASTER_PORT).

    Raises TrainingError within `patience`: PP-E708 where the store is not reached, PP-E709 where other ranks do not
    come.
    """
    try:
        store: Store = next(rendezvous("env://", own.rank, own.world_size, timeout=patience))[0]
    except RuntimeError as error:
        problem = _why_no_store(str(error), own, patience.total_seconds())
        if problem is None:
            raise
        raise TrainingError(problem) from error
    number = os.environ.get(_START) or _start(store, own, patience)
    os.environ[_START] = str(number)  # for this process after an exec with other variables
    return PrefixStore(f"ppctl/start/{number}/", store)


def _start(store: Store, own: OwnRank, patience: timedelta) -> int:
    """The number of this start of the ranks: torchrun restarts ranks with the store of their first start.

    The entries of an earlier start are addresses at which no process listens any more, and a run that may be another
    one. Rank 0 counts. Every other rank takes the newest number, or waits for the next one: if it has had that number
    before, and where that start's rank 0 has not found all of its ranks and never will, because a later one counts on.
    (torchrun's own count does not serve: each of several agents has one of its own.)
    """
    if own.rank == 0:
        number = store.add(_STARTS, 1)
        store.set(f"{_STARTS}/{number}", "1")
        if _TORCHRUN in os.environ:
            with suppress(RuntimeError):  # the roll call, which follows, says who has not come
                store.wait([f"{_STARTS}/{number}/{rank}" for rank in range(1, own.world_size)], patience)
            store.set(f"{_STARTS}/{number}/all", str(own.world_size))
        return number
    number, until = store.add(_STARTS, 0), time.monotonic() + patience.total_seconds()
    while number == 0 or store.add(f"{_STARTS}/{number}/{own.rank}", 1) > 1 or not _lives(store, number, own, until):
        if not _is_set(store, f"{_STARTS}/{number + 1}", until):
            message = f"rank 0 did not reach the store within {patience.total_seconds():g} s"
            raise TrainingError(Problem("PP-E709", message, "ppctl explain PP-E709"))
        number = store.add(_STARTS, 0)
    return number


def _lives(store: Store, number: int, own: OwnRank, until: float) -> bool:
    """Whether the start with this number is the present one: its rank 0 has found all ranks, this one among them."""
    if _TORCHRUN not in os.environ:
        return True  # a store for each start
    found, pause = f"{_STARTS}/{number}/all", 0.01
    while not store.check([found]):  # not `wait` with a limit: torch warns whenever one is over
        if store.check([f"{_STARTS}/{number + 1}"]) or time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LOOK)
    return int(store.get(found)) == own.world_size


def _is_set(store: Store, key: str, until: float) -> bool:
    """Whether somebody sets it in time."""
    try:
        store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
    except RuntimeError:
        return False
    return True


def _why_no_store(text: str, own: OwnRank, waited: float) -> Problem | None:
    """The problem in an error of the rendezvous; None where it is of another kind (a port in use)."""
    joined = re.search(r"(\d+)/(\d+) clients joined", text)
    if joined is not None:
        message = f"only {joined[1]} of {joined[2]} ranks reached the store on {host_name()} within {waited:g} s"
        return Problem("PP-E709", message, "ppctl explain PP-E709")
    if not re.search(r"trying to connect|failed to connect|Connection refused|resolve|getaddrinfo", text):
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    message = f"rank {own.rank} on {host_name()} did not reach rank 0's store at {host} port {port} within {waited:g} s"
    return Problem(
        "PP-E708", message, pasted("python", "-c", f"import socket; socket.create_connection({(host, port)}, 5)")
    )


def read_run(directory: Path) -> SharedRun:
    """The run of a run directory."""
    run = RunDir(directory)
    return SharedRun(run, run.read_config(), run.read_plan())


def publish_run(store: Store, shared: SharedRun) -> None:
    """Give the run to the ranks that call `receive_run`."""
    parts = {"directory": str(shared.run.path), "config": to_mapping(shared.config), "plan": shared.plan.to_json()}
    store.set(_RUN, json.dumps(parts))


def receive_run(store: Store) -> SharedRun | int:
    """The run that rank 0 published, or the exit code with which it refused one."""
    parts: dict[str, Any] = json.loads(store.get(_RUN))
    if "refused" in parts:
        store.add(_READERS, 1)
        return int(parts["refused"])
    return SharedRun(RunDir(Path(parts["directory"])), from_mapping(parts["config"]), Plan.from_json(parts["plan"]))


def refuse_run(store: Store, code: int, world_size: int, patience_s: float = 30.0) -> None:
    """Let every other rank exit with `code`. The store may be in rank 0, which stays until all have read it."""
    store.set(_RUN, json.dumps({"refused": code}))
    deadline = time.monotonic() + patience_s
    while store.add(_READERS, 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
