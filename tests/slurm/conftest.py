"""One cluster for the whole tier, whichever of xdist's workers come first and last; skipped with a reason elsewhere."""

import fcntl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import SLURM, Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Iterator[Cluster]:
    """A SLURM of seventeen nodes."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    own = tmp_path_factory.getbasetemp()
    home = (own if worker_id == "master" else own.parent) / "slurm"
    with shared(home):
        yield Cluster(home / "slurm.conf", tmp_path_factory.mktemp("work"))


@contextmanager
def shared(home: Path) -> Iterator[None]:
    """The first to come starts the cluster in `home`, the last to go stops it."""
    home.mkdir(exist_ok=True)
    count(home, 1, "start")
    try:
        yield
    finally:
        count(home, -1, "stop")


def count(home: Path, more: int, turn: str) -> None:
    """Add `more` to the number of workers that use the cluster, and start or stop it where nobody did or will."""
    with open(home / "users", "a+") as users:
        fcntl.flock(users, fcntl.LOCK_EX)
        users.seek(0)
        before = int(users.read() or 0)
        if 0 in (before, before + more):
            subprocess.run([str(SLURM / "cluster.sh"), turn, str(home)], check=True, timeout=120)
        users.truncate(0)
        users.write(str(before + more))
