"""How ranks find each other and come to hold the same run.

Knows the rank variables, the rendezvous store and what is published in it. Must not know how a config was composed.
Ranks of ppctl's launcher read the run directory themselves; ranks that others started get config and plan from rank 0
through the store, so that only logs and checkpoints need a shared file system.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, TrainingError
from ppctl.heartbeat import host_name
from ppctl.plan import Plan
from ppctl.rank.sockets import connecting_on_first_use
from ppctl.reach.hosts import connecting
from ppctl.rundir import RunDir

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

START_UP = timedelta(minutes=10)
"""How long ranks that others started wait for rank 0, which has the config and in it the run's own limit."""
_KEY = "ppctl/run"
_READ = "ppctl/read"
_STARTS = "ppctl/starts"
_START = "PPCTL_START"


@dataclass(frozen=True, slots=True)
class Ranks:
    """Who this process is, as whoever started it says."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE. Raises ConfigError naming what is missing."""
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise ConfigError(
                Problem(
                    "PP-E740",
                    f"a worker is started by a launcher, which sets {', '.join(missing)}",
                    "ppctl train +recipe=quickstart",
                )
            )
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_world = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        return cls(rank, int(os.environ.get("LOCAL_RANK", rank % local_world)), world, local_world)


@dataclass(frozen=True, slots=True)
class Job:
    """The run that all ranks agree on."""

    run: RunDir
    config: RunConfig
    plan: Plan

    @property
    def digest(self) -> str:
        """Of config and plan: equal on ranks that hold the same run."""
        text = json.dumps(to_mapping(self.config), sort_keys=True) + self.plan.digest
        return hashlib.sha256(text.encode()).hexdigest()


def meet(ranks: Ranks, patience: timedelta = START_UP) -> Store:
    """The store that all ranks share (MASTER_ADDR, MASTER_PORT).

    Raises TrainingError: PP-E708 where it is not reached within `patience`, PP-E709 where somebody waits there alone.
    """
    try:
        store: Store = next(rendezvous("env://", ranks.rank, ranks.world_size, timeout=patience))[0]
    except RuntimeError as error:
        problem = _no_store(str(error), ranks, patience.total_seconds())
        if problem is None:
            raise
        raise TrainingError(problem) from error
    number = os.environ.get(_START) or _start(store, ranks.rank, patience)
    os.environ[_START] = str(number)  # for this process when it begins anew with other variables
    return PrefixStore(f"ppctl/start/{number}/", store)


def _start(store: Store, rank: int, patience: timedelta) -> int:
    """The number of this start of the ranks. torchrun starts them again with the store that they had.

    What is under the names of an earlier start are addresses at which nobody listens any more, and a job that may be
    another one. Rank 0 counts. Every other rank takes the newest number, unless it has had that one before: then rank 0
    has yet to come. (torchrun's own count will not do: each of several agents has one of its own.)
    """
    if rank == 0:
        number = store.add(_STARTS, 1)
        store.set(f"{_STARTS}/{number}", "1")
        return number
    number = store.add(_STARTS, 0)
    while number == 0 or store.add(f"{_STARTS}/{number}/{rank}", 1) > 1:
        try:
            store.wait([f"{_STARTS}/{number + 1}"], patience)
        except RuntimeError as error:
            message = f"rank 0 has not come to the store within {patience.total_seconds():g} s"
            raise TrainingError(Problem("PP-E709", message, "ppctl explain PP-E709")) from error
        number = store.add(_STARTS, 0)
    return number


def _no_store(text: str, ranks: Ranks, waited: float) -> Problem | None:
    """What it means that the store did not come about; None where it is something else (a port in use)."""
    joined = re.search(r"(\d+)/(\d+) clients joined", text)
    if joined is not None:
        message = f"only {joined[1]} of {joined[2]} ranks came to the store on {host_name()} within {waited:g} s"
        return Problem("PP-E709", message, "ppctl explain PP-E709")
    if not re.search(r"trying to connect|failed to connect|Connection refused|resolve|getaddrinfo", text):
        return None
    where = f"{os.environ['MASTER_ADDR']} port {os.environ['MASTER_PORT']}"
    message = f"rank {ranks.rank} on {host_name()} did not reach rank 0's store at {where} within {waited:g} s"
    return Problem("PP-E708", message, f'python -c "import socket; socket.create_connection({_master()}, 5)"')


def _master() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def read_job(directory: Path) -> Job:
    """The job as its run directory has it."""
    run = RunDir(directory)
    return Job(run, run.read_config(), run.read_plan())


def publish_job(store: Store, job: Job) -> None:
    """Hand the job to the ranks that `receive_job`."""
    parts = {"directory": str(job.run.path), "config": to_mapping(job.config), "plan": job.plan.to_json()}
    store.set(_KEY, json.dumps(parts))


def receive_job(store: Store) -> Job | int:
    """The job that rank 0 published, or the exit code with which it refused one."""
    parts: dict[str, Any] = json.loads(store.get(_KEY))
    if "refused" in parts:
        store.add(_READ, 1)
        return int(parts["refused"])
    return Job(RunDir(Path(parts["directory"])), from_mapping(parts["config"]), Plan.from_json(parts["plan"]))


def refuse_job(store: Store, code: int, ranks: Ranks, patience_s: float = 30.0) -> None:
    """Let every other rank leave with `code`. Rank 0 may hold the store, and stays until they have read it."""
    store.set(_KEY, json.dumps({"refused": code}))
    deadline = time.monotonic() + patience_s
    while store.add(_READ, 0) < ranks.world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)


def join_world(store: Store, ranks: Ranks, device: torch.device, limit: timedelta) -> None:
    """Make the default process group: gloo for what is said between hosts' CPUs, NCCL beside it on CUDA.

    A rank connects with its neighbours in the world's ring here, where a failure is named; with others on first use.
    `limit` is how long its backends wait for other ranks; every group and connection that is made later takes it over.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    # NCCL's watchdogs would end the process before it can tell an error of the device, and one that the loading of a
    # kernel keeps waiting would end it before the run's own limits do.
    os.environ.setdefault("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0")
    os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(math.ceil(limit.total_seconds())))
    with connecting(ranks.rank, host_name(), "the job"), connecting_on_first_use():
        dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world_size, timeout=limit)
        dist.all_reduce(torch.zeros(1))
