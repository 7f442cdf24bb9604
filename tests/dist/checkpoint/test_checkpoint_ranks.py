"""Several ranks: any cut reads any cut, copies are compared, one failure is everybody's, a crash loses nothing."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import one_save
import pytest
import torch
import torch.distributed as dist
from ranks import RanksFailed, run_ranks
from verified import verify
from whole_tensors import held_shards

from ppctl.checkpoint import reading
from ppctl.checkpoint.boxes import boxes_of_run
from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.shards import Shard
from ppctl.errors import CheckpointError
from ppctl.runs.checkpoint_folder import find

LAYERS = 8
TIED = "model.tok_embeddings.weight"


def stage_tensors(pp_rank, pp, *, fill=None, width=4):
    """Layers n with n % pp == pp_rank (as interleaved chunks lie), the tied weight on the first and the last rank."""
    names = [f"model.layers.{n}.w" for n in range(LAYERS) if n % pp == pp_rank]
    names += [f"optim.layers.{n}.w.{slot}" for n in range(LAYERS) if n % pp == pp_rank for slot in ("exp_avg", "step")]
    found = {name: value(name, width) for name in names}
    if pp_rank in (0, pp - 1):
        found[TIED] = value(TIED, width) if pp > 1 else [value(TIED, width), value(TIED, width)]
    if fill is not None:
        torch.utils._pytree.tree_map(lambda tensor: tensor.fill_(fill), found)
    return found


def save(directory, step, tensors, state, **settings):
    return one_save.save(directory, step, held_shards(tensors), state, **settings)


def load(path, tensors):
    return reading.load(path, held_shards(tensors))


def value(name, width=4):
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.rand(() if name.endswith("step") else (width, 3), generator=generator)


def save_cut(directory, pp, step, width=4):
    rank = dist.get_rank()
    tensors = stage_tensors(rank % pp, pp, width=width)
    return save(Path(directory), step, tensors, {"step": step}, keep=2)


def load_cut(path, pp):
    tensors = stage_tensors(dist.get_rank() % pp, pp, fill=-1)
    state = load(Path(path), tensors)
    expected = stage_tensors(dist.get_rank() % pp, pp)
    same = torch.utils._pytree.tree_map(torch.equal, tensors, expected)
    return state, all(torch.utils._pytree.tree_leaves(same)), len(tensors)


@pytest.mark.parametrize(("world", "pp"), [(4, 4), (4, 2), (2, 1)], ids=["pp=4", "pp=2 dp=2", "pp=1 dp=2"])
def test_a_checkpoint_of_any_cut_loads_into_any_other(tmp_path, world, pp):
    (path,) = set(run_ranks(save_cut, world, tmp_path, pp, 5))
    assert sorted(verify(path).tensors) == sorted(stage_tensors(0, 1))
    for other_world, other_pp in ((4, 4), (2, 2), (1, 1), (2, 1)):
        for state, same, number in run_ranks(load_cut, other_world, path, other_pp):
            assert state == {"step": 5} and same and number > 0


def test_each_part_is_written_once_and_replicas_share_the_work(tmp_path):
    path = run_ranks(save_cut, 4, tmp_path, 2, 1)[0]
    places = [(shard.file, shard.bytes) for record in read_manifest(path).tensors.values() for shard in record.shards]
    assert len(places) == len(set(places)) == len(stage_tensors(0, 1))
    sizes = dict.fromkeys(("rank-00000", "rank-00001", "rank-00002", "rank-00003"), 0)
    for file, (begin, end) in places:
        sizes[file.removesuffix(".safetensors")] += end - begin
    assert min(sizes.values()) > 0 and max(sizes.values()) - min(sizes.values()) <= 4 * 3 * 4, "a tensor of difference"


def save_shards(directory, cut):
    return one_save.save(Path(directory), 1, shards_of(cut), {}, keep=0)


ROWS, COLUMNS = 12, 10
CUTS = {
    "whole, on all": lambda rank: [(0, 0, ROWS, COLUMNS)],
    "rows": lambda rank: [(3 * rank, 0, 3, COLUMNS)],
    "columns, the last ones shorter": lambda rank: [(0, 3 * rank, ROWS, min(3, COLUMNS - 3 * rank))],
    "both, on two each": lambda rank: [(6 * (rank % 2), 0, 6, 4), (6 * (rank % 2), 4, 6, 6)],
    "flat runs": lambda rank: [
        (*box.offset, *box.shape) for box in boxes_of_run((ROWS, COLUMNS), 31 * rank, min(31 * rank + 31, 120))
    ],
    "on one": lambda rank: [(0, 0, ROWS, COLUMNS)] * (rank == 2),
}  # fmt: skip


def shards_of(cut, fill=None):
    whole = torch.arange(float(ROWS * COLUMNS)).view(ROWS, COLUMNS)
    parts = []
    for row, column, height, width in CUTS[cut](dist.get_rank()):
        part = whole[row : row + height, column : column + width]
        parts.append(((row, column), part.clone() if fill is None else torch.full_like(part, fill)))
    return [Shard("w", (ROWS, COLUMNS), offset, part) for offset, part in parts]


def load_shards(path):
    answers = []
    for cut in CUTS:
        shards = shards_of(cut, fill=-1)
        reading.load(Path(path), shards)
        answers.append(all(torch.equal(a.tensor, b.tensor) for a, b in zip(shards, shards_of(cut), strict=True)))
    return answers


@pytest.mark.parametrize("cut", CUTS)
def test_any_division_of_a_tensor_is_saved_as_it_is_and_loaded_into_any_other(tmp_path, cut):
    path = run_ranks(save_shards, 4, tmp_path, cut)[0]
    stored = read_manifest(path).tensors["w"].shards
    assert sum(end - begin for shard in stored for begin, end in [shard.bytes]) == ROWS * COLUMNS * 4
    assert run_ranks(load_shards, 4, path) == [[True] * len(CUTS)] * 4


def listings_of_a_save(directory):
    """How often this rank lists the directory that is being written, from when it is there."""
    listed = []

    def audit(event, arguments):
        if event in ("os.scandir", "os.listdir") and str(arguments[0]).endswith(".tmp"):
            listed.append(arguments[0])

    sys.addaudithook(audit)
    save_cut(directory, 2, 1)
    return len(listed)


def test_no_rank_lists_the_files_of_all_others(tmp_path):
    """Of 2,048 ranks that would be four million directory entries a save, on a file system that all share."""
    assert run_ranks(listings_of_a_save, 4, tmp_path)[1:] == [0, 0, 0]


def load_without_layer(path, missing):
    tensors = stage_tensors(dist.get_rank(), 2)
    tensors.pop(missing, None)
    load(Path(path), tensors)


def test_what_no_rank_wants_is_unexpected_on_every_rank(tmp_path):
    path = run_ranks(save_cut, 2, tmp_path, 2, 1)[0]
    with pytest.raises(RanksFailed) as caught:
        run_ranks(load_without_layer, 2, path, "model.layers.3.w")
    for failure in caught.value.failures:
        assert failure.kind == "CheckpointError" and "PP-E502" in failure.message
        assert "model.layers.3.w" in failure.message
    assert {failure.rank for failure in caught.value.failures} == {0, 1}


def save_drifted(directory):
    tensors = stage_tensors(0, 1)
    if dist.get_rank() == 2:
        tensors["model.layers.5.w"].view(-1)[7] += 1e-7
    return refusal(lambda: save(Path(directory), 2, tensors, {}, keep=1))


def refusal(call):
    try:
        call()
    except CheckpointError as error:
        return [(problem.code, problem.message, problem.place) for problem in error.problems]
    return []


def test_unequal_replicas_are_refused_on_every_rank_by_name(tmp_path):
    (answer,) = set(map(tuple, run_ranks(save_drifted, 3, tmp_path)))
    ((code, message, place),) = answer
    assert code == "PP-E504" and "ranks 0, 1, 2" in message and place == "model.layers.5.w"
    assert not list(tmp_path.iterdir())


def save_with_limit(directory, limited_rank, limit):
    if dist.get_rank() == limited_rank:
        sys.dont_write_bytecode = True  # else a cut .pyc stays behind for everybody
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    return refusal(lambda: save_cut(directory, 2, 2, width=4000))


@pytest.mark.parametrize(
    ("limited_rank", "limit"),
    [(1, 0), (1, 100_000), (0, 100_000), (0, 0)],
    ids=["first byte", "in the middle", "in the middle, rank 0", "first byte, rank 0"],
)
def test_a_write_error_on_one_rank_reaches_all_and_leaves_the_old_checkpoint(tmp_path, limited_rank, limit):
    before = run_ranks(save_cut, 2, tmp_path, 2, 1)[0]
    answers = run_ranks(save_with_limit, 2, tmp_path, limited_rank, limit, timeout=30)
    for answer in answers:
        assert [code for code, _, _ in answer] == ["PP-E505"]
        assert f"rank {limited_rank} could not write the checkpoint {tmp_path / 'step-2'}" in answer[0][1]
        assert "File too large" in answer[0][1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-1"]
    assert latest(tmp_path) == before and all(same for _, same, _ in run_ranks(load_cut, 2, before, 2))


@pytest.fixture
def small_disk(tmp_path):
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=300k", "none", str(place)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if mounted.returncode:
        pytest.skip(f"cannot mount a small disk: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def save_wide(directory):
    return refusal(lambda: save_cut(directory, 2, 2, width=2000))


def test_a_full_disk_is_said_in_its_own_words_and_frees_what_was_written(small_disk):
    run_ranks(save_cut, 2, small_disk, 2, 1)
    for answer in run_ranks(save_wide, 2, small_disk, timeout=30):
        assert all(code == "PP-E505" and "No space left on device" in message for code, message, _ in answer)
        assert answer
    assert sorted(path.name for path in small_disk.iterdir()) == ["latest", "step-1"]
    run_ranks(save_cut, 2, small_disk, 2, 3)
    assert latest(small_disk) == small_disk / "step-3"


def save_without_permission(directory):
    if os.geteuid() == 0:
        os.seteuid(65534)  # root may write everywhere
    return refusal(lambda: save_cut(directory, 2, 1))


def test_a_directory_without_permission_is_said_on_every_rank(tmp_path):
    tmp_path.chmod(0o500)
    try:
        answers = run_ranks(save_without_permission, 2, tmp_path / "checkpoints", timeout=20)
    finally:
        tmp_path.chmod(0o700)
    for answer in answers:
        ((code, message, place),) = answer
        assert code == "PP-E505" and "Permission denied" in message and place == str(tmp_path / "checkpoints")


def save_failing_in_torch(directory):
    tensors = stage_tensors(dist.get_rank(), 2)
    if dist.get_rank() == 1:
        tensors["model.layers.1.w"] = torch.empty(2, device="meta")
    return refusal(lambda: save(Path(directory), 2, tensors, {}, keep=0))


def test_any_other_failure_on_one_rank_reaches_all_without_a_hang(tmp_path):
    for answer in run_ranks(save_failing_in_torch, 2, tmp_path, timeout=20):
        ((code, message, _),) = answer
        assert code == "PP-E507" and message.startswith("rank 1 failed to write the checkpoint")


def latest(directory):
    return find(directory).path


CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def save_killed_at(directory, step, doomed, number):
    """Save `step`, and be killed (SIGKILL) right before the `number`-th change under `directory`."""
    count = 0

    def watch(event, arguments):
        nonlocal count
        if event in CHANGES and str(directory) in str(arguments[0]):
            count += 1
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank() == doomed:
        sys.addaudithook(watch)
    save_cut(directory, dist.get_world_size(), step)


def assert_usable(directory, candidates):
    """`latest` is one of `candidates` and loads here (pp=1); the next save works and cleans up."""
    found = latest(directory)
    assert found is not None and found.name in candidates
    for path in directory.iterdir():
        if path.name.startswith("step-") and not path.suffix:
            verify(path)  # no half-deleted one is visible either
    tensors = stage_tensors(0, 1, fill=-1)
    load(found, tensors)
    same = torch.utils._pytree.tree_map(torch.equal, tensors, stage_tensors(0, 1))
    assert all(torch.utils._pytree.tree_leaves(same))
    save(directory, 9, stage_tensors(0, 1), {}, keep=0)
    assert latest(directory).name == "step-9"
    assert not [path.name for path in directory.iterdir() if path.suffix]


@pytest.mark.parametrize(
    ("world", "doomed", "step", "points"),
    [(1, 0, 3, 12), (1, 0, 2, 12), (2, 1, 3, 1)],
    ids=["rank 0", "rank 0 replacing step-2", "rank 1 of 2"],
)
def test_a_kill_before_any_change_to_the_directory_leaves_a_checkpoint_that_loads(
    tmp_path, world, doomed, step, points
):
    for earlier in (1, 2):
        run_ranks(save_cut, world, tmp_path / "0", world, earlier)
    for number in range(1, 200):
        directory = shutil.copytree(tmp_path / "0", tmp_path / str(number))
        try:
            run_ranks(save_killed_at, world, directory, step, doomed, number, timeout=20)
        except RanksFailed as failed:
            assert any(failure.kind == "died" for failure in failed.failures), failed
        else:
            break
        assert_usable(directory, ("step-2", "step-2.old", f"step-{step}"))
    assert latest(directory).name == f"step-{step}"
    assert number > points


def save_killed_while_writing(directory, doomed, byte):
    """Save step 2; the kernel kills the doomed rank at a byte of its file (SIGXFSZ, which Python would ignore)."""
    if dist.get_rank() == doomed:
        sys.dont_write_bytecode = True
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (byte, byte))
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    save_cut(directory, 2, 2, width=4000)


@pytest.mark.parametrize(("doomed", "byte"), [(0, 1), (0, 200_000), (1, 200_000)])
def test_a_kill_in_the_middle_of_a_write_leaves_the_previous_checkpoint(tmp_path, doomed, byte):
    run_ranks(save_cut, 2, tmp_path, 2, 1)
    with pytest.raises(RanksFailed) as caught:
        run_ranks(save_killed_while_writing, 2, tmp_path, doomed, byte, timeout=20)
    assert "died" in [failure.kind for failure in caught.value.failures]
    assert (tmp_path / "step-2.tmp" / f"rank-0000{doomed}.safetensors").stat().st_size == byte
    assert_usable(tmp_path, ("step-1",))
