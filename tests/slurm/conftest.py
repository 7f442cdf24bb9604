"""One cluster for the whole tier; skipped with a reason where it cannot run."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from cluster import HERE, Cluster, missing


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A SLURM of three nodes."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    home = tmp_path_factory.mktemp("slurm")
    script = str(HERE / "cluster.sh")
    try:
        subprocess.run([script, "start", str(home)], check=True, timeout=120)
        yield Cluster(home / "slurm.conf", tmp_path_factory.mktemp("work"))
    finally:
        subprocess.run([script, "stop", str(home)], check=True, timeout=120)
