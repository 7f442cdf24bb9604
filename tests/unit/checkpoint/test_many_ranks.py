"""What rank 0 does with what 2,048 ranks hold grows with the number of their parts, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from simulated_ranks import parts_of, written_by

from ppctl.checkpoint import disk
from ppctl.checkpoint.disk import WrittenParts, manifest_of
from ppctl.checkpoint.manifest import Manifest
from ppctl.checkpoint.tensor_parts import TensorPart, check_tensors, packed_parts
from ppctl.records import wire


def commit_and_read(ranks: int, dp: int) -> tuple[int, int, float]:
    """Choose writers, make the manifest, read and check it, in this process: parts, calls of functions, CPU seconds."""
    held = [parts_of(rank, dp) for rank in range(ranks)]
    packed = list(map(packed_parts, held))
    disk._writers.cache_clear()
    calls, seconds = 0, 0.0

    def count(frame: Any, event: str, value: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    def measured(work: Any) -> Any:
        nonlocal seconds
        sys.setprofile(count if ranks < 1024 else None)
        began = time.process_time()
        found = work()
        seconds += time.process_time() - began
        sys.setprofile(None)
        return found

    measured(lambda: disk.choose(packed))
    writers = disk._writers(tuple(packed))
    written = written_by(writers, held)
    text = measured(
        lambda: manifest_of(3, writers, [wire.unpacked(WrittenParts, each) for each in written]).to_text().encode()
    )
    manifest = measured(lambda: Manifest.from_text(text))
    parts = [
        TensorPart(name, record.shape, record.dtype, shard.box)
        for name, record in manifest.tensors.items()
        for shard in record.shards
    ]
    measured(lambda: check_tensors(parts))
    assert len(set(parts)) == len(parts) == len({part for own in held for part in own})
    return sum(map(len, held)), calls, seconds


@pytest.mark.parametrize(("ranks", "dp"), [(32, 4), (32, 16)])
def test_work_grows_with_the_parts(ranks: int, dp: int) -> None:
    parts, calls, _ = commit_and_read(ranks, dp)
    more, more_calls, _ = commit_and_read(4 * ranks, 4 * dp)
    assert more_calls / calls < 1.15 * more / parts


@pytest.mark.soak
@pytest.mark.timeout(480)
def test_the_manifest_of_2048_ranks_fits_into_a_gibibyte() -> None:
    script = f"""
import resource, sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[2] / "helpers")!r}]
from test_many_ranks import commit_and_read
parts, _, seconds = commit_and_read(2048, 128)
print(parts, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    parts, seconds, kib = map(float, done.stdout.split())
    print(f"{parts:.0f} parts of 2,048 ranks: {seconds:.1f} CPU s, {kib / 2**20:.2f} GiB")
    assert parts > 200_000 and kib < 2**20
