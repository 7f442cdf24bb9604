"""Saves beside training: the same bytes, whatever training does meanwhile, and no kill or fault loses a checkpoint."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from background_saves import PROGRAM, forked, kill, saver_of, writer_ends
from command import alive
from evaluated_runs import config_of, text
from observed_runs import train_noted
from one_save import save
from ranks import run_ranks
from verified import verify

from ppctl.checkpoint import disk, shards
from ppctl.checkpoint.boxes import boxes_of_run
from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.shards import Shard, whole_shards
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.errors import CheckpointError
from ppctl.plan.build import build_plan
from ppctl.plan.memory_limit import amount
from ppctl.runs.checkpoint_folder import find
from ppctl.train.session import build_session
from ppctl.train.snapshot import session_shards

__all__ = ["text"]


def held(step: int, rank: int = 0, world: int = 1) -> list[Shard]:
    """A matrix that ranks divide as a run read flat, one that all hold, tensors of other widths, a number, nothing."""
    whole = torch.arange(40.0).view(8, 5) + step
    runs = boxes_of_run((8, 5), 40 * rank // world, 40 * (rank + 1) // world)
    parts = [Shard("optim.w.exp_avg", (8, 5), box.offset, whole[box.within((0, 0))].clone()) for box in runs]
    copies = {"model.norm": torch.full((7,), float(step)), "model.b": torch.full((3,), step, dtype=torch.bfloat16)}
    return [
        *parts,
        *whole_shards(copies | {"optim.w.step": torch.tensor(float(step)), "model.empty": torch.ones(0, 3)}),
    ]


def content(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def both_ways(root: str, writer: bool) -> list[str]:
    """Steps 1 to 3 saved in the background, while what was copied changes, and 1 to 3 saved at once."""
    rank, world, warnings = dist.get_rank(), dist.get_world_size(), []
    now = held(1, rank, world)
    saver = saver_of(Path(root) / "background", now, writer=writer, warnings=warnings)
    for step in (1, 2, 3):
        for own, new in zip(now, held(step, rank, world), strict=True):
            own.tensor.copy_(new.tensor)
        saver.begin(step, now, {"step": step})
        for own in now:
            own.tensor.fill_(-1)
    saver.finish()
    saver.close()
    for step in (1, 2, 3):
        save(Path(root) / "at once", step, held(step, rank, world), {"step": step}, keep=0)
    return [problem.code for problem in warnings]


@pytest.mark.parametrize("writer", [True, False], ids=["writer", "own thread"])
def test_a_save_in_the_background_writes_the_same_bytes_while_training_changes_them(tmp_path, writer):
    assert run_ranks(both_ways, 2, str(tmp_path), writer) == [[], []]
    for step in (1, 2, 3):
        path = tmp_path / "background" / f"step-{step}"
        verify(path)
        assert content(path) == content(tmp_path / "at once" / f"step-{step}")


def trained(mapping: dict, directory: str) -> list[dict]:
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    return train_noted(session, Path(directory))[1].records


def test_a_run_saves_the_same_checkpoints_beside_training_and_says_how_long_it_waited(text, tmp_path):
    records = {}
    for mode in (True, False):
        config = config_of(text, pp=2)
        config.checkpoint.interval, config.checkpoint.keep, config.checkpoint.async_ = 1, 0, mode
        config.train.steps = 3
        records[mode] = run_ranks(trained, 2, to_mapping(config), str(tmp_path / str(mode)))[0]
    for step in (1, 2, 3):
        path, other = tmp_path / "True" / f"step-{step}", tmp_path / "False" / f"step-{step}"
        assert content(path) == content(other)
    assert [record["loss"] for record in records[True]] == [record["loss"] for record in records[False]]
    for mode, found in records.items():
        assert ["save_stall_s" in record for record in found] == [False, True, True], mode
        assert {record["saved_step"] for record in found if "saved_step" in record} <= {1, 2}
    assert [record.get("saved_step") for record in records[False]] == [None, 1, 2]


def held_bytes(mapping: dict) -> int:
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    return sum(shard.tensor.nbytes for shard in session_shards(session) if shard.tensor.dim())


@pytest.mark.parametrize(("dp", "sharding"), [(1, "none"), (2, "none"), (2, "optimizer_gradients"), (2, "full")])
def test_the_plan_knows_how_much_host_memory_the_copies_take(text, dp, sharding):
    config = config_of(text, pp=2, dp=dp)
    config.parallel.data_parallel_sharding, config.checkpoint.interval = sharding, 1
    plan = build_plan(config, {})
    (said,) = [each.equation for each in plan.derived if each.key == "checkpoint copies"]
    most = max(run_ranks(held_bytes, 2 * dp, to_mapping(config)))
    assert f"a rank keeps {amount(most)} of" in said and "neighbour" not in said
    config.checkpoint.local, config.checkpoint.local_every, config.checkpoint.local_replicas = "/dev/shm/ppctl", 1, 1
    (said,) = [each.equation for each in build_plan(config, {}).derived if each.key == "checkpoint copies"]
    assert f"a rank keeps {amount(most)} of" in said and "and as much for a neighbour's; the ranks" in said


# Kills


def killed_at_change(directory: Path, number: int, how: str) -> list[str]:
    """In a process: save step 3; the writer (`how` all: and this process) dies before a change of the directory."""
    warnings = []
    fault = f"change 0 {number} {how}:{directory}"
    saver = saver_of(directory, held(3), writer=True, keep=2, fault=fault, warnings=warnings)
    saver.begin(3, held(3), {"step": 3})
    saver.finish()
    saver.close()
    (directory.parent / f"told-{directory.name}").write_text(" ".join(problem.code for problem in warnings))
    return []


def assert_usable(directory: Path, steps: set[int]) -> None:
    """The newest is one of these steps, whole; so is every other; the next save works and cleans up."""
    found = find(directory).path
    assert found.suffix in ("", ".old") and (step := verify(found).step) in steps
    assert CheckpointReader(found, read_manifest(found)).tensor("model.norm").eq(step).all()
    for path in directory.glob("step-*"):
        if not path.suffix:
            verify(path)
    save(directory, 9, held(9), {}, keep=0)
    assert find(directory).path.name == "step-9" and not [each for each in directory.iterdir() if each.suffix]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    directory = tmp_path_factory.mktemp("before") / "checkpoints"
    for step in (1, 2):
        save(directory, step, held(step), {"step": step}, keep=2)
    return directory


CHANGES = 14
"""At least so many changes of the directory does a save make."""


@pytest.mark.parametrize("number", range(1, CHANGES + 7))
def test_a_writer_killed_before_any_change_loses_no_checkpoint(before, tmp_path, number):
    """Its rank goes on where it stopped."""
    directory = shutil.copytree(before, tmp_path / "checkpoints")
    os.waitpid(forked(lambda: killed_at_change(directory, number, "writer"), tmp_path), 0)
    told = (tmp_path / "told-checkpoints").read_text()
    assert told == "PP-E510" or (told == "" and number > CHANGES)
    assert find(directory).path.name == "step-3" and not (directory / "step-3.tmp").exists()
    assert not (directory / "step-1").exists(), "retention"
    assert_usable(directory, {3})


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=[pytest.mark.whole] * (number % 3 != 0)) for number in range(1, CHANGES + 7)],
)
def test_all_killed_before_any_change_leave_a_checkpoint_to_go_on_from(before, tmp_path, number):
    directory = shutil.copytree(before, tmp_path / "checkpoints")
    child = forked(lambda: killed_at_change(directory, number, "all"), tmp_path)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    assert killed or number > CHANGES
    assert writer_ends(tmp_path)
    assert_usable(directory, {2, 3} if killed else {3})


def save_until(directory: Path, first: int, *, writer: bool = True) -> None:
    shards = [Shard(f"w{n}", (1 << 15,), (0,), torch.zeros(1 << 15)) for n in range(16)]
    saver = saver_of(directory, shards, writer=writer, keep=2)
    (directory / "ready").touch()
    for step in itertools.count(first):
        for shard in shards:
            shard.tensor.fill_(step)
        saver.begin(step, shards, {"step": step})


def random_kills(root: Path, moments: int, seed: int) -> None:
    """Of the rank, of the writer and then the rank, or of both, at a moment of an endless run of saves."""
    draw, last, directory = random.Random(seed), 0, root / "checkpoints"
    directory.mkdir()
    for moment in range(moments):
        child = forked(lambda first=last + 1: save_until(directory, first), root)
        while not (directory / "ready").exists():
            time.sleep(0.005)
        (directory / "ready").unlink()
        while moment >= moments // 2 and find(directory) is None:  # a busy machine
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.1))
        writers, doomed = alive(root, PROGRAM), draw.choice(["rank", "writer, rank", "both"])
        if doomed == "writer, rank":
            kill(writers)
            time.sleep(draw.uniform(0, 0.05))
        kill([child] if doomed == "rank" else [*writers, child])
        os.waitpid(child, 0)
        assert writer_ends(root), "no process is left"
        found = find(directory)
        assert (found is None) == (last == 0) or found is not None, "never back to step 0"
        if found is not None:
            assert not found.warning
            reader = CheckpointReader(found.path, verify(found.path))
            step = reader.manifest.step
            assert step >= last and all(reader.tensor(f"w{n}").eq(step).all() for n in range(16))
            last = step
    assert last > 0


def test_kills_at_random_moments_leave_the_last_checkpoint_or_a_newer_one(tmp_path):
    files = set(os.listdir("/dev/shm"))
    random_kills(tmp_path, 10, seed=16)
    assert not [name for name in set(os.listdir("/dev/shm")) - files if "ppctl-checkpoint" in name]


@pytest.mark.soak
@pytest.mark.timeout(480)
def test_two_hundred_kills_at_random_moments(tmp_path):
    random_kills(tmp_path, 200, seed=17)


# Faults of the disk


def refused(saver) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        saver.finish()
    return caught.value


def test_a_disk_that_is_full_at_any_write_keeps_the_good_checkpoint(before, tmp_path, monkeypatch):
    """The hook stands in for a disk without room, at every call of write in turn."""
    write, count = os.write, [0]
    for full_at in itertools.count(1):
        directory = shutil.copytree(before, tmp_path / str(full_at))
        saver = saver_of(directory, held(3), writer=False)
        count[0] = 0

        def no_room(descriptor: int, data: bytes, at: int = full_at) -> int:
            count[0] += 1
            if count[0] == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(descriptor, data)

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", no_room)
            saver.begin(3, held(3), {})
            if count[0] < full_at and _ends(saver):
                break
            (problem,) = refused(saver).problems
        assert problem.code == "PP-E505" and "No space left on device" in problem.message
        assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-1", "step-2"]
        saver.begin(4, held(4), {})
        saver.finish()
        assert_usable(directory, {4})
    assert full_at > 5


def _ends(saver) -> bool:
    try:
        return saver.finish()
    except CheckpointError as error:
        saver._error = error
        return False


def save_into_a_locked_directory(directory):
    saver = saver_of(Path(directory), held(1), writer=dist.get_rank() == 0 and os.geteuid() != 0)
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write everywhere
    saver.begin(1, held(1), {})
    return [problem.code for problem in refused(saver).problems], saver.under_way


def test_a_read_only_directory_is_told_on_every_rank(tmp_path):
    tmp_path.chmod(0o500)
    try:
        answers = run_ranks(save_into_a_locked_directory, 2, tmp_path / "checkpoints", timeout=30)
    finally:
        tmp_path.chmod(0o700)
    assert answers == [(["PP-E505"], None)] * 2


def test_training_goes_on_beside_a_slow_disk_and_the_next_save_waits(tmp_path, monkeypatch):
    """The disk answers when the test lets it."""
    answer, write = Event(), disk.write

    def slow(*arguments):
        answer.wait(60)
        return write(*arguments)

    monkeypatch.setattr(disk, "write", slow)
    saver = saver_of(tmp_path, held(1), writer=False)
    saver.begin(1, held(1), {})
    assert saver.under_way == 1 and not saver.finish(0.0) and not saver.news() and find(tmp_path) is None
    answer.set()
    saver.begin(2, held(2), {})
    assert find(tmp_path).path.name == "step-1" or saver.finish()
    saver.finish()
    assert [saved.step for saved in saver.news()] == [1, 2] and saver.under_way is None
    assert_usable(tmp_path, {2})


def test_another_run_that_takes_the_directory_is_an_error_and_no_mixed_checkpoint(before, tmp_path, monkeypatch):
    """Two starts must not share one; where they do, the one whose draft was swept away fails."""
    directory, write, began = shutil.copytree(before, tmp_path / "checkpoints"), disk.write, Event()
    taken = Event()

    def interrupted(*arguments):
        if not began.is_set():
            began.set()
            taken.wait(60)
        return write(*arguments)

    monkeypatch.setattr(disk, "write", interrupted)
    one, other = (saver_of(directory, held(3), writer=False) for _ in range(2))
    one.begin(3, held(3), {"run": "one"})
    began.wait(60)
    other.begin(4, held(4), {"run": "other"})
    other.finish()
    taken.set()
    (problem,) = refused(one).problems
    assert problem.code == "PP-E505" and "step-3" in problem.message + problem.place
    assert_usable(directory, {4})


def test_memory_that_cuda_cannot_pin_is_told_with_what_to_do(monkeypatch):
    cudart = SimpleNamespace(
        cudaHostRegister=lambda *_: 2, cudaError=lambda number: number, cudaGetErrorString=lambda _: "out of memory"
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    with pytest.raises(CheckpointError, match="GiB: CUDA cannot pin it, out of memory") as raised:
        shards._pin(torch.empty(8, dtype=torch.uint8))
    assert [problem.code for problem in raised.value.problems] == ["PP-E511"]


def test_a_save_waits_for_a_gpu_on_that_gpu(tmp_path, monkeypatch):
    """A new thread is on the first GPU: each rank of a node would make a context there, beside that of its owner."""
    now, seen = [], []

    class On:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            now.append(self.device)

        def __exit__(self, *_):
            now.pop()

    monkeypatch.setattr(torch.cuda, "device", On)
    saver, gpu = saver_of(tmp_path, held(1), writer=False), torch.device("cuda", 3)
    saver.memory._streams = {gpu: None}
    copied = SimpleNamespace(synchronize=lambda: seen.append([*now]))
    saver.memory.copy = lambda shards: [copied]
    saver.begin(1, held(1), {})
    saver.finish()
    assert seen == [[gpu]]
