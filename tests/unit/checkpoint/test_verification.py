"""A checkpoint that is not what was written: which tensor, which file, which bytes; without torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from array_checkpoints import arrays, save

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.verification import bytes_of_values, examine, misfits
from ppctl.errors import Problem
from ppctl.runs.checkpoint_folder import AUTO, candidates

FIRST, SECOND = "rank-00000.safetensors", "rank-00001.safetensors"
WQ = "model.layers.2.attention.wq.weight"


def exchange_files(path: Path) -> None:
    (path / FIRST).rename(path / "aside")
    (path / SECOND).rename(path / FIRST)
    (path / "aside").rename(path / SECOND)


def manifest_of_another_run(path: Path) -> None:
    other = save(path.parent.parent / "other", 4, arrays(7))
    shutil.copy(other / "manifest.json", path / "manifest.json")


def cut(path: Path) -> None:
    """In the middle of the last tensor of the second file."""
    os.truncate(path / SECOND, (path / SECOND).stat().st_size - 2)


def flip(path: Path) -> None:
    begin, end = part(path, SECOND).bytes
    data = bytearray((path / SECOND).read_bytes())
    data[(begin + end) // 2] ^= 1
    (path / SECOND).write_bytes(data)


def part(path: Path, file: str) -> object:
    return next(shard for shard in read_manifest(path).tensors[WQ].shards if shard.file == file)


def told(problems: list[Problem]) -> str:
    assert {problem.code for problem in problems} == {"PP-E503"}
    return "\n".join(map(str, problems))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(tmp_path / "run", 2, arrays(1))
    return save(tmp_path / "run", 4, arrays(2))


def test_what_was_written_is_good_and_every_byte_of_values_is_read(path: Path) -> None:
    seen: list[int] = []
    found = examine(path, progress=seen.append)
    assert found.problems == [] and sum(seen) == found.read == bytes_of_values(read_manifest(path))
    assert found.read == sum(value.nbytes for value in arrays(2).values())
    quick = examine(path, values=False)
    assert (quick.problems, quick.read) == ([], 0)


def test_two_exchanged_files_are_named(path: Path) -> None:
    exchange_files(path)
    for values in (True, False):
        text = told(examine(path, values=values).problems)
        assert f"damaged: {FIRST} has " in text and f"damaged: {SECOND} has " in text


def test_a_manifest_of_another_run_is_named_with_tensor_file_and_bytes(path: Path) -> None:
    manifest_of_another_run(path)
    begin, end = part(path, FIRST).bytes
    assert f"{FIRST} has changed since it was written: bytes {begin} to {end}, of {WQ}" in told(examine(path).problems)


def test_a_missing_file_is_named(path: Path) -> None:
    (path / SECOND).unlink()
    assert f"{SECOND} is missing" in told(examine(path).problems)


def test_a_truncated_file_is_named_with_its_sizes(path: Path) -> None:
    cut(path)
    text = told(examine(path).problems)
    size = (path / SECOND).stat().st_size
    assert f"{SECOND} has {size} bytes instead of {size + 2}" in text


def test_a_flipped_byte_is_found_only_by_reading_values(path: Path) -> None:
    begin, end = part(path, SECOND).bytes
    flip(path)
    assert f"bytes {begin} to {end}, of {WQ} (their xxh3-128 differs)" in told(examine(path).problems)
    assert examine(path, values=False).problems == []


@pytest.mark.parametrize(
    "damage",
    [exchange_files, manifest_of_another_run, lambda path: (path / FIRST).unlink(), cut, flip],
    ids=["exchanged", "another manifest", "missing", "cut", "flipped"],
)
def test_the_good_one_is_kept_and_is_the_next_that_a_start_tries(path: Path, damage: object) -> None:
    damage(path)
    assert [found.path.name for found in candidates(AUTO, path.parent)] == ["step-4", "step-2"]
    assert examine(path).problems and examine(path.with_name("step-2")).problems == []
    assert "checkpoint.resume" in examine(path).problems[0].remedy


def test_tensors_are_compared_with_a_models_in_both_directions(path: Path) -> None:
    manifest = read_manifest(path)
    wanted = {name: {(record.shape, record.dtype)} for name, record in manifest.tensors.items()}
    assert misfits(path, manifest, wanted) == []
    wanted["model.layers.3.attention.wq.weight"] = wanted.pop(WQ)
    wanted["model.norm.weight"] = {((5,), "float32")}
    assert [problem.place for problem in misfits(path, manifest, wanted)] == [
        "model.layers.3.attention.wq.weight",
        WQ,
        "model.norm.weight: bfloat16[5] saved, float32[5] here",
    ]
