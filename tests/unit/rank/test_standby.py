"""A process that waits to become a rank: what it is told, what it makes of nonsense, and how it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, threading
at_import = dict(os.environ), threading.current_thread() is threading.main_thread(), os.getpriority(os.PRIO_PROCESS, 0)
def run(arguments):
    print(arguments, at_import[1:], os.getpriority(os.PRIO_PROCESS, 0), threading.current_thread().name)
    print("RANK" in at_import[0], os.environ["RANK"], repr(sys.stdin.read()), flush=True)
    print("to the log", file=sys.stderr, flush=True)
    os._exit(7)
"""


@pytest.fixture
def start(tmp_path: Path):
    """Starts a process whose program is `text`; it ends with the test."""
    started = []

    def started_with(text: str, nice: int = 0) -> subprocess.Popen[bytes]:
        (tmp_path / "its_program.py").write_text(text)
        path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
        command = [sys.executable, "-m", "ppctl.rank.standby", "its_program", str(nice)]
        plain = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": path}
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=plain))
        return started[-1]

    yield started_with
    for process in started:
        process.kill()
        process.communicate()


def told(log: Path, *, prints: bool, **variables: str) -> bytes:
    return json.dumps({"variables": variables, "arguments": ["--join"], "log": str(log), "prints": prints}).encode()


@pytest.mark.parametrize("prints", [True, False])
def test_it_becomes_the_rank_that_it_is_told(start, tmp_path: Path, prints: bool) -> None:
    """With variables that its program's import has not seen, in the main thread, at the priority that it began with."""
    before, log = os.getpriority(os.PRIO_PROCESS, 0), tmp_path / "rank-0000.log"
    log.write_text("of an earlier life\n")
    process = start(PROGRAM, nice=5)
    shown, _ = process.communicate(told(log, prints=prints, RANK="3"), timeout=60)
    assert process.returncode == 7
    said = [f"['--join'] (False, {min(before + 5, 19)}) {before} MainThread", "False 3 ''"]
    assert shown.decode().splitlines() == (said if prints else [])
    assert log.read_text().splitlines() == ["of an earlier life", *([] if prints else said), "to the log"]


def test_an_import_that_fails_is_told_in_the_log(start, tmp_path: Path) -> None:
    process = start("raise ImportError('no such library')")
    process.communicate(told(tmp_path / "log", prints=False), timeout=60)
    assert process.returncode == 1
    assert "ImportError: no such library" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    "text", [b"garbage", b"[]", b'{"variables": {}}', told(Path("log"), prints=True)[:-1], b"\xff\x00"]
)
def test_nonsense_runs_no_program(start, tmp_path: Path, text: bytes) -> None:
    process = start(PROGRAM)
    shown, _ = process.communicate(text, timeout=60)
    assert process.returncode == 1 and shown == b""


def test_it_ends_when_its_pipe_does_even_if_it_still_imports(start) -> None:
    began, process = time.monotonic(), start("import time; time.sleep(300)")
    time.sleep(0.5)
    process.communicate(b"", timeout=60)
    assert process.returncode == 0 and time.monotonic() - began < 60
