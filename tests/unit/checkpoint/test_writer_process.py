"""The writer of a node: what it imports, what its errors are, and that it is gone when its ranks are."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.disk import choose, commit, prepare, problems_of
from ppctl.checkpoint.tensor_parts import TensorPart, packed_parts
from ppctl.checkpoint.writer import NodeWriter, WriterProcess
from ppctl.errors import CheckpointError

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


def held(dtype: str, offset: int = 0) -> list[bytes]:
    return [packed_parts([TensorPart("w", (4,), dtype, Box((offset,), (4,)))])]


FAILING: dict[str, Callable[[Path], tuple[Any, ...]]] = {
    "a file in the way": lambda place: (prepare, place / "file" / "below", 1),
    "no such checkpoint": lambda place: (commit, place, 1, held("int8"), [], b""),
    "parts that are not all": lambda place: (choose, held("int8", 1)),
    "an unknown dtype": lambda place: (choose, held("int3")),
    "no path": lambda place: (prepare, Path("a\0b"), 1),
}


@pytest.mark.parametrize("what", FAILING)
def test_errors_of_the_writer_are_those_of_a_rank_that_writes_itself(what: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    descriptor = os.memfd_create("ppctl-test")
    os.ftruncate(descriptor, 64)
    writer = NodeWriter(WriterProcess().address, 3, descriptor, 64, pytest.fail)
    work, *arguments = FAILING[what](tmp_path)
    with pytest.raises(Exception) as own:
        work(*arguments)
    with pytest.raises(CheckpointError) as writers:
        writer.do("do it", work, *arguments)
    writer.close()
    assert writers.value.problems == problems_of(own.value, "do it", 3)
