"""How ranks find each other and get the same run.

Ranks of ppctl's launcher read the run directory themselves; ranks of another launcher get config and plan from rank 0
through the store, so that only logs and checkpoints need a shared file system.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch._C._distributed_c10d import PrefixStore

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, TrainingError
from ppctl.host.private_files import NODE_DIRECTORY, is_own_name, names, own_directory, shared_memory
from ppctl.plan import Plan
from ppctl.reach.store import SealedStore, connect, file_store, halves, unproved
from ppctl.runs.run_starts import SECRET, secret_of
from ppctl.runs.rundir import RunDir

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

START_UP = timedelta(minutes=10)
"""How long a rank waits for rank 0 before it has the config, which has the run's own limit."""
_FIRST_RANK = timedelta(minutes=1)
"""How long a rank waits for its node's first rank: both have met, but the first may have to start again."""
_RUN = "ppctl/run"
_READERS = "ppctl/read"
_STARTS = "ppctl/starts"
_START = "PPCTL_START"
_NODE = "ppctl/node"
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_DUMP = "exception_dump"
"""torch's key, without a prefix: NCCL's watchdog sets it when a message fails. Where it is set, NCCL's monitor writes
its record and ends its rank eight minutes later; an agent's store would keep the key for the next start's ranks."""
_LOOK = 0.5
"""The most seconds between looks at the store, which gets two questions from each of up to 2,047 ranks."""


@dataclass(frozen=True, slots=True)
class OwnRank:
    """This process's place among the ranks, as its launcher has set it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> OwnRank:
        """Read RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE. Raises ConfigError naming missing variables."""
        server = () if NODE_DIRECTORY in os.environ else ("MASTER_ADDR", "MASTER_PORT")
        missing = [name for name in ("RANK", "WORLD_SIZE", *server) if name not in os.environ]
        if missing:
            message = f"a worker must be started by a launcher, which sets {', '.join(missing)}"
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
        """The digest of config and plan, equal on ranks that have the same run."""
        text = json.dumps(to_mapping(self.config), sort_keys=True) + self.plan.digest
        return hashlib.sha256(text.encode()).hexdigest()


def meet(own: OwnRank, patience: timedelta = START_UP) -> Store:
    """The store that all ranks share, with a prefix for this start. Raises TrainingError (PP-E709) if rank 0 does not
    come, and as `reach.store.connect` does."""
    store = connect(own.rank, own.world_size, patience)
    if own.rank == 0:  # before any rank of this start has a group: they wait for what rank 0 publishes
        store.delete_key(_DUMP)
    number = os.environ.get(_START) or _start(store, own, patience)
    os.environ[_START] = str(number)  # for this process after an exec with other variables
    return PrefixStore(f"ppctl/start/{number}/", store)


def sealed(store: Store, run: RunDir, *, reported: bool = False) -> SealedStore:
    """The store with the secret of the run's newest start. `reported` and the errors are those of `secret_of`."""
    # A number alone may also be the number of another job's start, whose secret is still in its run directory.
    start = [os.environ.get(name, "") for name in (_TORCHRUN, "MASTER_PORT", _START)]
    return SealedStore(store, secret_of(run, reported=reported), " ".join(start))


def store_of_groups(store: SealedStore, own: OwnRank, directory: Path, hosts: Sequence[str]) -> Store:
    """The store that torch's groups connect through: a file in the node's `directory` if all ranks are on this node,
    since the machine's other users reach any port. A collective, after all ranks on `hosts` have come."""
    if NODE_DIRECTORY in os.environ or len(hosts) > 1:
        return store.plain
    store.set(f"{_NODE}/{own.rank}", directory.name)
    shared = all(store.get(f"{_NODE}/{rank}") == directory.name for rank in range(own.world_size))
    return file_store(directory, own.world_size) if shared else store.plain


def _start(store: Store, own: OwnRank, patience: timedelta) -> int:
    """The number of this start of the ranks: torchrun restarts ranks with the store of their first start.

    The entries of an earlier start are addresses at which no process listens any more, and a run that may be another
    one. Rank 0 counts. Every other rank takes the newest number; it waits for the next number if it has had the newest
    before, or if that start's rank 0 never finds all ranks, because a later rank 0 counts on. (torchrun's own count
    does not serve: each of several agents has one of its own.)
    """
    if own.rank == 0:
        number = store.add(_STARTS, 1)
        store.set(f"{_STARTS}/{number}", "1")
        if _TORCHRUN in os.environ:
            with suppress(RuntimeError):  # the roll call, which follows, names ranks that have not come
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
    """Whether the start with this number is the present start: its rank 0 has found all ranks, this rank among them."""
    if _TORCHRUN not in os.environ:
        return True  # a store for each start
    complete, pause = f"{_STARTS}/{number}/all", 0.01
    while not store.check([complete]):  # not `wait` with a limit: torch warns at the end of each
        if store.check([f"{_STARTS}/{number + 1}"]) or time.monotonic() > until:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LOOK)
    # a value of another number of ranks does not count
    return bool(store.get(complete) == str(own.world_size).encode())


def _is_set(store: Store, key: str, until: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=max(0.001, until - time.monotonic())))
    except RuntimeError:
        return False
    return True


def node_directory(own: OwnRank, store: SealedStore, at_end: ExitStack) -> Path:
    """The directory of this start on this node: the launcher's if that is ppctl's, else made by the node's first rank.
    A rank in a container of its own, which cannot use that directory, has another, which no other rank reads."""
    if NODE_DIRECTORY in os.environ:
        return Path(os.environ[NODE_DIRECTORY])
    key = f"{_NODE}/of/{own.rank - own.local_rank}"
    if own.local_rank != 0:
        with suppress(RuntimeError, OSError):  # the roll call reports a first rank that does not come
            store.plain.wait([key], _FIRST_RANK)
            name = str(store.get(key))
            if is_own_name(name):
                names(shared_memory() / name)
                return shared_memory() / name
    path = at_end.enter_context(own_directory(shared_memory()))
    if own.local_rank == 0:
        store.set(key, path.name)
    return path


def read_run(directory: Path) -> SharedRun:
    """Read the config and the plan of a run directory."""
    run = RunDir(directory)
    return SharedRun(run, run.read_config(), run.read_plan())


def publish_run(store: SealedStore, shared: SharedRun) -> None:
    """Give the run to the ranks that call `receive_run`."""
    if not store.has_proofs:
        print(f"notice: {SECRET}=none: whoever reaches the rendezvous store can run programs as you", file=sys.stderr)
    parts = {"directory": str(shared.run.path), "config": to_mapping(shared.config), "plan": shared.plan.to_json()}
    store.set(_RUN, parts)


def receive_run(store: Store, directory: Path | None = None) -> tuple[SharedRun, SealedStore] | int:
    """The run that rank 0 published and the store with its secret, or the exit code with which rank 0 refused a run.
    Without the run's `directory`, the secret's place comes from a value without proof: the secret counts only if its
    file is this user's own. Raises TrainingError (PP-E776)."""
    if directory is not None:
        own = sealed(store, RunDir(directory))
        return _shared(own.get(_RUN)), own
    try:
        parts = json.loads(halves(store.get(_RUN))[1])
        if "refused" in parts:
            store.add(_READERS, 1)
            if type(code := parts["refused"]) is int and 0 < code < 126:
                return code
            raise ValueError(f"{code!r} is no exit code")
        named = RunDir(Path(parts["directory"]))
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise TrainingError(unproved(_RUN)) from error
    own = sealed(store, named, reported=True)
    return _shared(own.get(_RUN)), own  # all of it: what was read before may have been a stranger's


def _shared(parts: Mapping[str, Any]) -> SharedRun:
    return SharedRun(RunDir(Path(parts["directory"])), from_mapping(parts["config"]), Plan.from_json(parts["plan"]))


def refuse_run(store: Store, code: int, world_size: int, patience_s: float = 30.0) -> None:
    """Let every other rank exit with `code`. Waits at most `patience_s` for them: the store may be in rank 0."""
    SealedStore(store, None, "").set(_RUN, {"refused": code})  # there is no run, and so no secret
    deadline = time.monotonic() + patience_s
    while store.add(_READERS, 0) < world_size - 1 and time.monotonic() < deadline:
        time.sleep(0.02)
