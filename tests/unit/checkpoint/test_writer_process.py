"""The writer of a node: what it imports, and that it is gone when its ranks are."""

from __future__ import annotations

import subprocess
import sys
import time

IMPORTS = (
    "import sys, ppctl.checkpoint.writer; print(*{'torch', 'numpy', 'ppctl.config', 'asyncio'} & set(sys.modules))"
)


def test_it_imports_neither_torch_nor_numpy() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"


ABANDON = """
import os
from ppctl.checkpoint.writer import WriterProcess
print(WriterProcess().process.pid, flush=True)
os._exit(0)
"""


def test_a_writer_that_no_rank_has_reached_ends_with_the_process_that_started_it() -> None:
    done = subprocess.run([sys.executable, "-c", ABANDON], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 20
    while _runs(int(done.stdout)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(int(done.stdout))


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False
