"""Another user takes names in shared memory: a run neither waits for what is there, nor reads or removes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import TINY, environment, metrics, only_run

SCRIPT = Path(__file__).with_name("squatted_memory.py")
TRAIN = ("train", "+recipe=quickstart", *TINY, "pp=1", "vpp=1", "steps=2")

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or subprocess.run(["unshare", "--mount", "true"]).returncode != 0,
    reason="needs root and a mount namespace, for another user and shared memory that nobody else sees",
)


def attacked(what: str, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `ppctl arguments` where a stranger has taken names; the script ends it after 45 seconds."""
    command = ["unshare", "--mount", sys.executable, str(SCRIPT), what, sys.executable, "-m", "ppctl", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)


def test_a_run_does_not_touch_what_a_stranger_has_put_under_its_names(tmp_path: Path) -> None:
    done = attacked("names", tmp_path, *TRAIN, "checkpoint.local=/dev/shm/ppctl", "checkpoint.local_every=1")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and len(metrics(only_run(tmp_path))) == 2


WHOLE = [pytest.param(kind, marks=pytest.mark.whole) for kind in ("fifo", "file", "link to a directory")]


@pytest.mark.parametrize("kind", ["directory", *WHOLE])
def test_copies_are_not_kept_in_what_a_stranger_has_made(tmp_path: Path, kind: str) -> None:
    place = f"/dev/shm/copies {kind}"
    done = attacked("copies", tmp_path, *TRAIN, f"checkpoint.local={place}", "checkpoint.local_every=1")
    assert done.returncode == 3, done.stderr
    assert "error PP-E650: " in done.stderr and place in done.stderr and "Traceback" not in done.stderr
