"""Copies in memory, on the ranks' own hosts and on neighbouring ones: which a start goes on from, and what is left."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from evaluated_runs import config_of, text
from observed_runs import Notes, train_noted
from ranks import run_ranks

from ppctl.checkpoint.local_copy import directory_of
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan.build import build_plan
from ppctl.runs.checkpoint_folder import AUTO, candidates
from ppctl.train.callback import Callback
from ppctl.train.session import build_session

__all__ = ["text"]


def going_on(
    mapping: dict, directory: str, fail_in: int | None, hosts: str = ""
) -> tuple[list[tuple[int, float]], list[str]]:
    """In a rank: the steps and losses of a start of the run, which fails in a step (None: never); what it said.

    `hosts` has a letter for each rank: those with the same one share memory.
    """
    config, notes, lines = from_mapping(mapping), Notes(), []
    if hosts:
        config.checkpoint.local += f"/{hosts[dist.get_rank()]}"
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))

    class Struck(Callback):
        def enter(self, state: str, step: int) -> None:
            if state == "training" and step == fail_in:
                raise RuntimeError("struck by a test")

    on_disk = partial(candidates, AUTO, Path(directory))
    with suppress(RuntimeError):
        train_noted(session, Path(directory), notes, Struck(), candidates=on_disk, say=lines.append)
    return [(record["step"], record["loss"]) for record in notes.records], lines


@pytest.fixture
def memory(tmp_path):
    """A directory in /dev/shm of this test's own."""
    directory = Path("/dev/shm") / f"ppctl-test-{os.getpid()}-{tmp_path.name}"
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def local_mapping(text, memory):
    config = config_of(text, pp=2)
    config.checkpoint.interval, config.checkpoint.keep, config.checkpoint.resume = 4, 0, AUTO
    config.checkpoint.local, config.checkpoint.local_every, config.train.steps = str(memory), 1, 8
    return to_mapping(config)


def files_of(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.rglob("*") if path.is_file())


def test_a_run_that_failed_goes_on_from_copies_in_memory_and_removes_them_in_the_end(local_mapping, memory, tmp_path):
    whole = run_ranks(going_on, 2, {**local_mapping}, str(tmp_path / "whole" / "checkpoints"), None)[0][0]
    assert [step for step, _ in whole] == list(range(1, 9)) and files_of(memory) == []
    directory = tmp_path / "run" / "checkpoints"
    first, _ = run_ranks(going_on, 2, local_mapping, str(directory), 6)[0]
    assert files_of(memory) == [f"rank-0000{rank}.{end}" for rank in (0, 1) for end in ("json", "values")]
    (rest, lines), (_, silent) = run_ranks(going_on, 2, local_mapping, str(directory), None)
    assert first + rest == whole and [step for step, _ in rest] == [7, 8], "two steps later than the disk has"
    assert lines[0] == "going on from the copies of step 6 in memory; there is step-4 on the disk" and silent == []
    assert files_of(memory) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ("lost", "note: copies in memory (steps 6) are not whole for this cut: going on from step-4 on the disk"),
        ("flipped", "warning: copies in memory have changed since they were made; they are not used"),
        ("torn", "note: copies in memory (steps 6) are not whole for this cut: going on from step-4 on the disk"),
        (
            "of another start",  # left on a host that was not part of the start in between
            "note: copies in memory (steps 6) are not whole for this cut: going on from step-4 on the disk",
        ),
    ],
)
def test_copies_that_are_not_whole_on_all_ranks_are_passed_over(local_mapping, memory, tmp_path, spoil, said):
    directory = tmp_path / "run" / "checkpoints"
    run_ranks(going_on, 2, local_mapping, str(directory), 6)
    record, values = (directory_of(memory, directory.parent) / f"rank-00001.{end}" for end in ("json", "values"))
    if spoil == "lost":
        record.unlink()
    elif spoil == "torn":
        record.write_text(record.read_text()[:40])
    elif spoil == "of another start":
        record.write_text(json.dumps({**json.loads(record.read_text()), "start": "0123456789abcdef"}))
    else:
        data = bytearray(values.read_bytes())
        data[len(data) // 2] ^= 1
        values.write_bytes(data)
    rest, lines = run_ranks(going_on, 2, local_mapping, str(directory), None)[0]
    assert lines[0] == said and [step for step, _ in rest] == [5, 6, 7, 8]


def test_copies_of_another_cut_or_no_later_than_the_disk_are_not_used(local_mapping, memory, tmp_path):
    directory = tmp_path / "run" / "checkpoints"
    run_ranks(going_on, 2, local_mapping, str(directory), 4)
    assert "rank-00000.json" in files_of(memory)
    rest, lines = run_ranks(going_on, 2, local_mapping, str(directory), 6)[0]
    assert [step for step, _ in rest] == [5, 6] and not any("memory" in line for line in lines)
    other = {**local_mapping, "parallel": {**local_mapping["parallel"], "pipeline_model_parallel_size": 1}}
    other["launch"] = {**local_mapping["launch"], "gpus_per_node": 1}
    rest, lines = run_ranks(going_on, 1, other, str(directory), None)[0]
    said = "note: copies in memory (steps 6) are not whole for this cut: going on from step-4 on the disk"
    assert [step for step, _ in rest] == [5, 6, 7, 8] and lines[0] == said


@pytest.mark.parametrize(
    ("refused", "on_disk", "code"),
    [("optim.name", True, "PP-E774"), ("data.seq_length", True, "PP-E741"), ("optim.name", False, "PP-E775")],
)
def test_a_start_that_is_refused_leaves_the_copies_to_the_next_one(
    local_mapping, memory, tmp_path, refused, on_disk, code
):
    directory = tmp_path / "run" / "checkpoints"
    if not on_disk:
        local_mapping["checkpoint"]["interval"] = 0
    run_ranks(going_on, 2, local_mapping, str(directory), 6)
    before = files_of(memory)
    other = {**local_mapping, "optim": {**local_mapping["optim"]}, "data": {**local_mapping["data"]}}
    if refused == "optim.name":
        other["optim"]["name"] = "muon"
    else:
        other["data"]["seq_length"] //= 2
    with pytest.raises(Exception, match=code):
        run_ranks(going_on, 2, other, str(directory), None)
    assert files_of(memory) == before
    (rest, lines), _ = run_ranks(going_on, 2, local_mapping, str(directory), None)
    assert [step for step, _ in rest] == [7, 8] and "going on from the copies of step 6" in lines[0]


# Copies on a neighbour's host


@pytest.fixture
def kept_mapping(local_mapping):
    local_mapping["checkpoint"]["local_replicas"] = 1
    return local_mapping


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory):
    """Steps and losses of a run that nothing happens to."""
    config = config_of(text, pp=2)
    config.train.steps = 8
    directory = tmp_path_factory.mktemp("undisturbed") / "checkpoints"
    return run_ranks(going_on, 2, to_mapping(config), str(directory), None)[0][0]


def spoilt(how: str, copies: dict[str, Path]) -> None:
    """What happens to the memory of hosts a and b, of which the first ranks are 0 and 1."""
    if how == "a is lost":
        shutil.rmtree(copies["a"])
    elif how == "both are lost":
        shutil.rmtree(copies["a"])
        shutil.rmtree(copies["b"])
    elif how == "all die while they copy":
        for rank, host in enumerate("ab"):
            (copies[host] / f"rank-0000{rank}.json").unlink()
    elif how == "b is lost while all copy":
        (copies["a"] / "rank-00000.json").unlink()
        shutil.rmtree(copies["b"])
    elif how == "a byte of rank 0's flips":
        data = bytearray((values := copies["a"] / "rank-00000.values").read_bytes())
        data[len(data) // 3] ^= 1
        values.write_bytes(data)
    elif how == "b is lost, and a's copy of it has changed":
        shutil.rmtree(copies["b"])
        data = bytearray((values := copies["a"] / "rank-00001.kept.values").read_bytes())
        data[len(data) // 3] ^= 1
        values.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "hosts", "first", "said"),
    [
        ("a is lost", "ab", 7, "going on from the copies of step 6 in memory"),
        ("a is lost", "cb", 7, "going on from the copies of step 6 in memory"),
        ("nothing, but ranks change places", "ba", 7, "going on from the copies of step 6 in memory"),
        ("a byte of rank 0's flips", "ab", 7, "going on from the copies of step 6 in memory"),
        ("all die while they copy", "ab", 7, "going on from the copies of step 6 in memory"),
        (
            "b is lost while all copy",
            "ab",
            5,
            "note: copies in memory (steps 6) are not whole for this cut: going on from",
        ),
        ("both are lost", "cd", 5, None),
        ("b is lost, and a's copy of it has changed", "ab", 5, "copies in memory have changed"),
    ],
)
def test_a_run_that_lost_a_host_goes_on_from_what_its_neighbour_kept(
    kept_mapping, undisturbed, memory, tmp_path, how, hosts, first, said
):
    directory = tmp_path / "run" / "checkpoints"
    begun, _ = run_ranks(going_on, 2, kept_mapping, str(directory), 6, "ab")[0]
    assert len(files_of(memory)) == 8, "of two ranks, twice, each with its record"
    spoilt(how, {host: directory_of(memory / host, directory.parent) for host in "ab"})
    rest, lines = run_ranks(going_on, 2, kept_mapping, str(directory), None, hosts)[0]
    assert begun + rest[7 - first :] == undisturbed and [step for step, _ in rest] == list(range(first, 9))
    assert (said in lines[0]) if said else not any("memory" in line for line in lines), lines
    assert not [file for host in set(hosts) for file in files_of(memory / host)]


def test_a_host_may_be_lost_again_before_the_next_copy(kept_mapping, undisturbed, memory, tmp_path):
    """What was brought to a host is as good as what was made there, and goes to a neighbour at once."""
    directory = tmp_path / "run" / "checkpoints"
    run_ranks(going_on, 2, kept_mapping, str(directory), 6, "ab")
    shutil.rmtree(memory / "a")
    rest, _ = run_ranks(going_on, 2, kept_mapping, str(directory), 6, "cb")[0]
    assert rest == [] and len(files_of(memory)) == 8, "of both ranks, twice"
    shutil.rmtree(memory / "b")
    rest, lines = run_ranks(going_on, 2, kept_mapping, str(directory), None, "cd")[0]
    assert rest == undisturbed[6:]
    assert lines[0] == "going on from the copies of step 6 in memory; there is step-4 on the disk"
