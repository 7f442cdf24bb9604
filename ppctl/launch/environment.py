"""Detects who started this process (a person, torchrun, SLURM), and what a rank needs in its environment."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ppctl.errors import ConfigError, Problem
from ppctl.host.devices import loopback_variables
from ppctl.host.files import cache_directory

_NO_STEP = frozenset({"", "batch", "extern", "interactive", *map(str, range(4294967290, 4294967296))})
"""SLURM's names for steps that the user did not start with srun: the batch script, an interactive shell."""


@dataclass(frozen=True, slots=True)
class Started:
    """The starter of this process, and its rank."""

    by: str
    """`torchrun`, `slurm` (srun), `env` (rank variables of another scheduler), `node` (agents), or `person`."""
    rank: int = 0
    world_size: int = 1
    run_id: str | None = None
    """The id that torchrun or SLURM gives to all ranks of this start, if any."""
    restarts: int = 0
    """How often the starter has restarted this job."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, as a worker needs them."""

    @property
    def is_rank(self) -> bool:
        """Whether torchrun, SLURM or another scheduler started this process as one rank of a job."""
        return self.by not in ("person", "node")


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SHOWN = re.compile(
    r"RANK|WORLD_SIZE|MASTER_.*|LOCAL_.*|PET_.*|.*_RESTART_COUNT|SLURM_(PROCID|LOCALID|NODEID|NTASKS|JOB_ID|(STEP_|TASKS_).*)"
)


def detect(environ: Mapping[str, str]) -> Started:
    """Detect who started this process. Raises ConfigError (PP-E606) if rank variables are incomplete or no numbers."""
    try:
        if all(environ.get(name) for name in _RANK_VARIABLES):
            return _by_variables(environ)
        if environ.get("SLURM_STEP_ID", "") not in _NO_STEP:
            started = slurm_rank(environ)
            # A step with a single task is a place to launch from.
            return started if started.world_size > 1 else Started("person")
    except (KeyError, ValueError) as error:
        raise _incomplete(environ, error) from error
    return Started("person")


def _incomplete(environ: Mapping[str, str], error: Exception) -> ConfigError:
    given = {name: value for name, value in environ.items() if _SHOWN.fullmatch(name)}
    message = f"the variables that say which rank this is are incomplete or not numbers: {error}; set: {given}"
    return ConfigError(Problem("PP-E606", message, "unset RANK WORLD_SIZE", "environment"))


def _by_variables(environ: Mapping[str, str]) -> Started:
    """The place of this process from RANK, WORLD_SIZE and MASTER_*. Raises KeyError or ValueError for wrong ones."""
    rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if not 0 <= rank < world:
        raise ValueError(f"RANK {rank} is not below WORLD_SIZE {world}")
    local_world = int(environ.get("LOCAL_WORLD_SIZE", world))
    if local_world < 1:
        raise ValueError(f"LOCAL_WORLD_SIZE {local_world} is below 1")
    local = int(environ.get("LOCAL_RANK", rank % local_world))
    server = {"MASTER_ADDR": environ["MASTER_ADDR"], "MASTER_PORT": str(int(environ["MASTER_PORT"]))}
    elastic = environ.get("TORCHELASTIC_RUN_ID")
    # torchrun without --rdzv-id calls every run "none": that is no id.
    run_id = elastic if elastic not in (None, "", "none") else None
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", 0)) + int(environ.get("SLURM_RESTART_COUNT", 0))
    variables = rank_variables(rank, local, world, local_world) | server
    return Started("torchrun" if elastic else "env", rank, world, run_id, restarts, variables)


def rank_variables(rank: int, local: int, world: int, local_world: int) -> dict[str, str]:
    """The variables of a rank's place: its number, its number on its machine, and how many there are."""
    ranks = {"RANK": rank, "LOCAL_RANK": local, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": local_world}
    return {name: str(value) for name, value in ranks.items()}


def slurm_rank(environ: Mapping[str, str]) -> Started:
    """The rank of this task of an srun. Raises KeyError or ValueError if SLURM's variables are incomplete."""
    rank, local = int(environ["SLURM_PROCID"]), int(environ["SLURM_LOCALID"])
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"])
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    restarts = int(environ.get("SLURM_RESTART_COUNT", 0))
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", str(tasks))
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "127.0.0.1")
    tasks_here = _tasks_on(per_node, int(environ.get("SLURM_NODEID", 0)))
    # Below the kernel's range of assigned ports; different for jobs that share hosts, for their steps, and for
    # consecutive starts.
    port = 20000 + (16 * job + 4 * (step % 4) + restarts % 4) % 10000
    alone = tasks_here == tasks
    server = {"MASTER_ADDR": "127.0.0.1" if alone else first_host(nodes), "MASTER_PORT": str(port)}
    variables = rank_variables(rank, local, tasks, tasks_here) | server
    return Started("slurm", rank, tasks, f"{job}.{step}", restarts, variables)


def node_place(environ: Mapping[str, str]) -> tuple[int, int, str, int]:
    """(the index of this node in its job, the number of nodes and spares, the rendezvous' address, its port): for a
    pod, or for a task of an srun with one task per node. Raises ConfigError (PP-E606)."""
    try:
        if "PET_NODE_RANK" in environ:
            index, nodes, port = (int(environ[f"PET_{name}"]) for name in ("NODE_RANK", "NNODES", "MASTER_PORT"))
            return index, nodes, environ["PET_MASTER_ADDR"], port
        task = slurm_rank(environ)
        return task.rank, task.world_size, task.variables["MASTER_ADDR"], int(task.variables["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise _incomplete(environ, error) from error


def first_host(nodelist: str) -> str:
    """The first host of SLURM's node list: `rack[1-2]n[03-4],x7` begins with rack1n03."""
    outermost = re.split(r",(?![^\[]*\])", nodelist)[0]
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", outermost)


def _tasks_on(per_node: str, node: int) -> int:
    """The number of tasks on one node, from SLURM's short form, as `4(x2),3`. Raises ValueError for another form."""
    counts: list[int] = []
    for part in per_node.split(","):
        match = re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)
        if match is None:
            raise ValueError(f"tasks per node {per_node!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]


HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def allocator_variables(huge_pages: Path = HUGE_PAGES) -> dict[str, str]:
    """Variables that make a rank's C library keep each large host tensor on huge pages of its own.

    Otherwise glibc would keep them on its heap, where a freed block is too small, once aligned, for the next one of the
    same size, so that the peak grows with the microbatches (decision 9). Memory on separate pages is returned when it
    is freed. Nothing is set without huge pages: page faults would double a stage's CPU time.
    """
    try:
        choice = huge_pages.read_text()
    except OSError:
        return {}
    size = str(2 * 2**20)  # the size from which torch itself uses huge pages
    return {} if "[never]" in choice else {"MALLOC_MMAP_THRESHOLD_": size, "THP_MEM_ALLOC_ENABLE": "1"}


def default_variables() -> dict[str, str]:
    """Every rank's default variables, which the environment overrides: one thread, a stack trace on a crash, this
    user's cache for torch.compile, and those of the allocator."""
    variables = {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | allocator_variables()
    # torch.compile would load libraries from /tmp/torchinductor_USER, which another user may have made.
    with suppress(RuntimeError):  # a user without a home directory
        variables["TORCHINDUCTOR_CACHE_DIR"] = str(cache_directory() / "compiled")
    return variables


def rank_environment(rank: int, world_size: int, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a local rank: defaults, this process's variables, `launch.env`, the rank's; later ones win."""
    own = rank_variables(rank, rank, world_size, world_size)
    return default_variables() | dict(os.environ) | loopback_variables() | dict(extra) | own
