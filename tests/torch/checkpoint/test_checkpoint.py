"""One process: what a checkpoint keeps, what it refuses, what it leaves behind."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time

import one_save
import pytest
import torch
from safetensors.torch import load_file
from verified import verify
from whole_tensors import held_shards

from ppctl.checkpoint import disk, manifest, reading
from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.run_state import read_state
from ppctl.checkpoint.shards import Shard
from ppctl.checkpoint.tensor_parts import TensorPart, choose_writers
from ppctl.errors import CheckpointError
from ppctl.runs import checkpoint_folder
from ppctl.runs.checkpoint_folder import find, step_path

STATE = {"step": 2, "consumed_samples": 16, "seed": 7, "config": {"model": {"num_layers": 2}}, "layout": "Et|tL"}


def tensors(value=1.0):
    generator = torch.Generator().manual_seed(int(value))
    weight = torch.randn(6, 5, generator=generator)
    return {
        "model.layers.0.attention.wq.weight": torch.nn.Parameter(weight),
        "model.layers.1.attention.wq.weight": weight.T,
        "model.norm.weight": torch.full((5,), value, dtype=torch.bfloat16),
        "optim.norm.weight.step": torch.tensor(value),
        "optim.norm.weight.exp_avg": torch.arange(10.0)[2:7] * value,
        "empty": torch.empty(0, 3),
    }


def save(directory, step, held, state, **settings):
    return one_save.save(directory, step, held_shards(held), state, **settings)


def load(path, held):
    return reading.load(path, held_shards(held))


def blank(value=1.0):
    return {name: torch.full_like(tensor, -1.0) for name, tensor in tensors(value).items()}


def write(directory, step, value=None, **settings):
    value = float(step) if value is None else value
    return save(directory, step, tensors(value), {**STATE, "step": step}, **{"keep": 0, **settings})


def assert_holds(path, value):
    loaded = blank()
    state = load(path, loaded)
    for name, expected in tensors(value).items():
        assert torch.equal(loaded[name], expected), name
    return state


def refused(call, *args, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        call(*args, **kwargs)
    assert caught.value.exit_code == 3
    return caught.value.problems


def latest(directory):
    found = find(directory)
    return None if found is None else found.path


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_what_was_saved_is_what_is_loaded_bit_by_bit(tmp_path):
    path = write(tmp_path / "checkpoints", 2)
    assert path == step_path(tmp_path / "checkpoints", 2) == latest(tmp_path / "checkpoints")
    assert assert_holds(path, 2.0) == read_state(path) == STATE
    assert names(path) == ["manifest.json", "rank-00000.safetensors", "state.json"]


def test_a_parameter_is_filled_in_place_and_still_learns(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(3))
    path = save(tmp_path, 1, {"w": torch.arange(3.0)}, {}, keep=0)
    load(path, {"w": parameter})
    (parameter * 2).sum().backward()
    assert parameter.tolist() == [0.0, 1.0, 2.0] and parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_both_uses_of_a_tied_weight_are_stored_once_and_filled_both(tmp_path):
    embedding, output = torch.ones(4, 2), torch.ones(4, 2)
    path = save(tmp_path, 1, {"model.tok_embeddings.weight": [embedding, output]}, {}, keep=0)
    first, second = torch.zeros(4, 2), torch.zeros(4, 2)
    load(path, {"model.tok_embeddings.weight": [first, second]})
    assert torch.equal(first, embedding) and torch.equal(second, output)
    assert list(verify(path).tensors) == ["model.tok_embeddings.weight"]


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    path = save(tmp_path, 1, {"w": torch.zeros(1_000_000)[:10]}, {}, keep=0)
    assert (path / "rank-00000.safetensors").stat().st_size < 10_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop("model.norm.weight"), "has tensors that this model lacks"),
        (lambda t: t.update({"model.layers.7.w": torch.zeros(2)}), "lacks tensors of this model"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(6)}), "another shape or dtype"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(5)}), "another shape or dtype"),
        (lambda t: t.update({"model.norm.weight": [torch.zeros(5), t["model.norm.weight"]]}), "another shape or dtype"),
    ],
    ids=["unexpected", "missing", "shape", "dtype", "one copy of two"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_fills_nothing(tmp_path, change, said):
    path = write(tmp_path, 2)
    target = blank()
    change(target)
    (problem,) = refused(load, path, target)
    assert problem.code == "PP-E502" and said in problem.message
    assert torch.equal(target["optim.norm.weight.step"], torch.tensor(-1.0))


def test_all_misfits_are_named_at_once_and_runs_of_layers_shortly(tmp_path):
    path = write(tmp_path, 2)
    target = blank() | {f"model.layers.{n}.w": torch.zeros(1) for n in (3, 4, 5, 9)}
    del target["empty"]
    target["model.norm.weight"] = torch.zeros(4)
    problems = refused(load, path, target)
    assert [problem.place for problem in problems] == [
        "model.layers.{3-5,9}.w",
        "empty",
        "model.norm.weight: bfloat16[5] saved, float32[4] here",
    ]


def flip(path, offset=-40):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


DATA = "rank-00000.safetensors"


def shard_of(path, name):
    (shard,) = read_manifest(path).tensors[name].shards
    return shard


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip(path / DATA, 12), f"{DATA} has changed since it was written: bytes 0 to"),
        (lambda path: os.truncate(path / DATA, 1000), f"{DATA} has 1000 bytes instead of"),
        (lambda path: os.truncate(path / DATA, 0), f"{DATA} has 0 bytes instead of"),
        (lambda path: (path / DATA).unlink(), f"{DATA} is missing"),
        (lambda path: flip(path / "state.json"), "state.json has changed"),
        (lambda path: (path / "state.json").unlink(), "state.json is missing"),
        (lambda path: os.truncate(path / "manifest.json", 100), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
        (lambda path: flip(path / "manifest.json", 200), "manifest.json cannot be read"),
        (lambda path: flip(path / "manifest.json", -20), "manifest.json cannot be read"),
    ],
    ids=lambda value: value.replace(DATA, "data") if isinstance(value, str) else "",
)
def test_a_damaged_file_is_named_and_fills_nothing(tmp_path, damage, said):
    path = write(tmp_path, 2)
    damage(path)
    target = blank()
    for call in (lambda: verify(path), lambda: load(path, target)):
        (problem,) = refused(call)
        assert problem.code == "PP-E503" and said in problem.message, problem.message
    assert all((tensor == -1).all() for tensor in target.values())


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.attention.wq.weight", "optim.norm.weight.step"])
def test_a_flipped_bit_is_told_with_tensor_file_and_bytes(tmp_path, name):
    path = write(tmp_path, 2)
    begin, end = shard_of(path, name).bytes
    flip(path / DATA, end - 1)
    for call in (lambda: verify(path), lambda: load(path, blank())):
        (problem,) = refused(call)
        said = f"damaged: {DATA} has changed since it was written: bytes {begin} to {end}, of {name} (their xxh3-128"
        assert problem.code == "PP-E503" and said in problem.message, problem.message


def test_every_chunk_of_a_large_shard_has_a_digest_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "CHUNK", 64)
    monkeypatch.setattr(disk, "CHUNK", 64)
    value = torch.arange(60.0).view(5, 12)  # 240 bytes: three chunks and three quarters
    path = save(tmp_path, 1, {"w": value}, {}, keep=0)
    assert len(shard_of(path, "w").digests) == 4
    for rows in (slice(0, 1), slice(1, 4), slice(4, 5), slice(0, 5)):
        for columns in (slice(0, 12), slice(3, 5), slice(11, 12)):
            out = torch.zeros(rows.stop - rows.start, columns.stop - columns.start)
            CheckpointReader(path, read_manifest(path)).fill("w", (rows.start, columns.start), out)
            assert torch.equal(out, value[rows, columns])
    begin, _ = shard_of(path, "w").bytes
    flip(path / DATA, begin + 130)
    CheckpointReader(path, read_manifest(path)).fill("w", (0, 0), torch.zeros(2, 12))  # of the chunks before it
    (problem,) = refused(CheckpointReader(path, read_manifest(path)).fill, "w", (3, 0), torch.zeros(1, 1))
    assert f"bytes {begin + 128} to {begin + 192}, of w" in problem.message


def test_shards_that_were_exchanged_are_caught(tmp_path):
    """Two tensors of one size in one file; the manifest is the file's own, then one that fits the exchange."""
    path = write(tmp_path, 2)
    names = "model.layers.0.attention.wq.weight", "model.layers.1.attention.wq.weight"
    (first, second), data = (shard_of(path, name).bytes for name in names), bytearray((path / DATA).read_bytes())
    data[slice(*first)], data[slice(*second)] = data[slice(*second)], data[slice(*first)]
    (path / DATA).write_bytes(data)
    problems = refused(verify, path)
    assert sorted(name for name in names for problem in problems if f"of {name} " in problem.message) == list(names)
    assert "PP-E503" in str(refused(load, path, blank()))


def test_a_manifest_of_another_run_is_caught(tmp_path):
    one, other = write(tmp_path / "one", 2), write(tmp_path / "other", 2, 3.0)
    shutil.copy(other / "manifest.json", one / "manifest.json")
    problems = refused(verify, one)
    assert {problem.code for problem in problems} == {"PP-E503"} and "of model.norm.weight " in str(problems)
    assert "PP-E503" in str(refused(load, one, blank()))


def test_a_file_of_the_checkpoint_is_read_by_safetensors_alone(tmp_path):
    path = write(tmp_path, 2)
    assert list(load_file(path / DATA)) and load_file(path / DATA).keys() == tensors(2.0).keys()
    for name, value in load_file(path / DATA).items():
        assert torch.equal(value, tensors(2.0)[name]), name


@pytest.mark.parametrize(
    ("make", "code", "words"),
    [
        (lambda path: None, "PP-E501", "there is no checkpoint at"),
        (lambda path: path.mkdir(), "PP-E501", "is not a checkpoint"),
        (lambda path: path.write_text(""), "PP-E501", "is not a checkpoint"),
        (lambda path: of_another_format(path, '{"format": 99}'), "PP-E509", "format 99, but this ppctl reads format 2"),
        (lambda path: of_another_format(path, FORMAT_1), "PP-E509", "format 1, but this ppctl reads format 2"),
    ],
    ids=["nothing", "an empty directory", "a file", "another format", "format 1"],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, make, code, words):
    make(tmp_path / "step-1")
    for call in (read_state, verify, lambda path: load(path, blank())):
        (problem,) = refused(call, tmp_path / "step-1")
        assert problem.code == code and words in problem.message


FORMAT_1 = """{
 "files": {"state.json": {"bytes": 15, "sha256": "f40c8c9c29e5ab0ba6d1c1a2ba9c2a6e3c1ac29a2a8cd0ea0ebd5ed6f3d0e0cb"}},
 "format": 1,
 "step": 3,
 "tensors": {"model.norm.weight": {"dtype": "float32", "sha256": "00ff", "shape": [5]}}
}"""
"""A manifest as versions before 0.1.0 wrote it."""


def of_another_format(path, manifest):
    path.mkdir()
    (path / "manifest.json").write_text(manifest)


def test_a_start_finds_none_before_the_first_and_the_newest_when_latest_names_what_is_gone(tmp_path):
    assert find(tmp_path / "checkpoints") is None
    write(tmp_path, 1)
    write(tmp_path, 2)
    shutil.rmtree(tmp_path / "step-2")
    assert latest(tmp_path) == tmp_path / "step-1"
    assert "latest names step-2, which is not there; using step-1" in find(tmp_path).warning
    assert_holds(latest(tmp_path), 1.0)


def test_a_checkpoint_without_its_manifest_is_refused_with_another_one_to_go_on_from(tmp_path):
    """The one that `latest` names is damaged: a start reads it all the same, and says so (exit code 3)."""
    directory = tmp_path / "my run" / "checkpoints"
    write(directory, 1)
    write(directory, 2)
    (directory / "step-2" / "manifest.json").unlink()
    assert latest(directory) == directory / "step-2"
    for call in (verify, read_state, lambda path: load(path, blank())):
        (problem,) = refused(call, directory / "step-2")
        assert problem.code == "PP-E501"
        words = shlex.split(problem.remedy)
        assert words == ["ppctl", "resume", str(directory.parent), f"checkpoint.resume={directory / 'step-1'}"]


def test_without_the_latest_file_the_last_complete_checkpoint_counts(tmp_path):
    write(tmp_path, 9)
    write(tmp_path, 10)
    (tmp_path / "latest").unlink()
    (tmp_path / "step-11.tmp").mkdir()
    assert latest(tmp_path) == tmp_path / "step-10"


@pytest.mark.parametrize(("keep", "left"), [(0, {1, 2, 10}), (1, {10}), (2, {2, 10}), (3, {1, 2, 10}), (9, {1, 2, 10})])
def test_keep_deletes_the_oldest(tmp_path, keep, left):
    for step in (1, 2, 10):
        write(tmp_path, step, keep=keep)
    assert set(names(tmp_path)) == {"latest"} | {f"step-{step}" for step in left}
    assert_holds(latest(tmp_path), 10.0)


def test_every_so_many_steps_a_checkpoint_stays_besides(tmp_path):
    for step in range(1, 8):
        write(tmp_path, step, keep=2, keep_every=3)
    assert set(names(tmp_path)) == {"latest", "step-3", "step-6", "step-7"}


def save_in_child(directory, step):
    """A process that saves `step`, without the tests' handlers."""
    child = os.fork()
    if child == 0:
        try:
            save(directory, step, {f"w{n}": torch.full((1 << 16,), float(step)) for n in range(32)}, {}, keep=2)
        finally:
            os._exit(0)
    return child


def test_a_kill_at_random_moments_leaves_a_checkpoint_to_go_on_from(tmp_path):
    """Ten of them between the begin of a save and its end."""
    began = time.monotonic()
    os.waitpid(save_in_child(tmp_path, 1), 0)
    whole, draw = time.monotonic() - began, random.Random(16)
    last, killed = 1, 0
    for step in range(2, 12):
        child = save_in_child(tmp_path, step)
        time.sleep(draw.uniform(0, whole))
        os.kill(child, signal.SIGKILL)
        killed += os.waitpid(child, 0)[1] == signal.SIGKILL
        found = latest(tmp_path)
        assert found.name in (f"step-{last}", f"step-{step}")
        last, reader = verify(found).step, CheckpointReader(found, read_manifest(found))
        assert all(reader.tensor(f"w{n}").eq(last).all() for n in range(32))
        checkpoint_folder.sweep(tmp_path)
        assert not [name for name in names(tmp_path) if name.endswith((".tmp", ".old"))]
    assert killed > 1, "hardly any save was killed"


PEAK = """
import sys, torch
from pathlib import Path
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.manifest import read_manifest
def memory(key):
    return int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
reader = CheckpointReader(Path(sys.argv[1]), read_manifest(Path(sys.argv[1])))
held = torch.ones(4096, 8192)  # 128 MiB: half of every row
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = memory("VmRSS")
reader.fill("w", (0, 8192), held)
print(memory("VmHWM") - before, held.nbytes, held.eq(3).all().item())
"""


def test_a_load_needs_little_more_memory_than_what_it_fills(tmp_path):
    path = save(tmp_path, 1, {"w": torch.full((4096, 16384), 3.0)}, {}, keep=0)
    command = [sys.executable, "-c", PEAK, str(path)]
    extra, held, right = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert right == "True" and int(extra) <= 0.2 * int(held)


def test_a_run_that_was_set_back_keeps_its_own_newest_and_replaces_what_it_reaches(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    write(tmp_path, 2, value=20.0, keep=1)
    assert names(tmp_path) == ["latest", "step-2", "step-3"]
    assert latest(tmp_path) == tmp_path / "step-2"
    assert_holds(latest(tmp_path), 20.0)


def test_leftovers_of_crashed_saves_are_removed_by_the_next_save(tmp_path):
    write(tmp_path, 1)
    (tmp_path / "step-2.tmp").mkdir()
    (tmp_path / "step-2.tmp" / "rank-00000.safetensors").write_text("half")
    (tmp_path / "latest.tmp").write_text("step-")
    (tmp_path / "notes.tmp").write_text("mine")
    (tmp_path / "step-1").rename(tmp_path / "step-1.old")  # as if killed while step-1 was replaced
    assert latest(tmp_path) == tmp_path / "step-1.old"
    write(tmp_path, 3)
    assert names(tmp_path) == ["latest", "notes.tmp", "step-1", "step-3"]
    assert_holds(tmp_path / "step-1", 1.0)


def test_copies_that_differ_on_one_rank_are_refused_by_name(tmp_path):
    tied = [torch.zeros(3), torch.zeros(3)]
    tied[1][2] = -0.0  # equal as numbers, not as bits
    (problem,) = refused(save, tmp_path, 1, {"a": torch.ones(1), "tied": tied}, {}, keep=0)
    assert (problem.code, problem.place) == ("PP-E504", "tied") and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([(0, 0), (2, 0)], "a: 6 of 18 elements are in no part"),
        ([(0, 0), (2, 0), (3, 0)], "a: [2:4, 0:3] and [3:5, 0:3] overlap"),
        ([(0, 0), (2, 0), (5, 0)], "a: [5:7, 0:3] is outside of [6, 3]"),
        ([(0, 0), (2, 0), (4, 1)], "a: [4:6, 1:4] is outside of [6, 3]"),
    ],
    ids=["missing", "overlapping", "behind the end", "beside it"],
)
def test_parts_that_do_not_make_up_a_tensor_are_refused(tmp_path, offsets, said):
    held = [Shard("a", (6, 3), offset, torch.ones(2, 3)) for offset in offsets]
    (problem,) = refused(one_save.save, tmp_path, 1, held, {}, keep=0)
    assert (problem.code, problem.place) == ("PP-E506", said) and not list(tmp_path.iterdir())
    path = save(tmp_path, 1, {"a": torch.ones(6, 3)}, {}, keep=0)
    (problem,) = refused(reading.load, path, held)
    assert (problem.code, problem.place) == ("PP-E506", said)


@pytest.mark.parametrize("place", ["checkpoints", "."], ids=["the directory is a file", "its parent is a file"])
def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" if place == "checkpoints" else tmp_path / "file" / "checkpoints"
    (problem,) = refused(write, directory, 1)
    assert problem.code == "PP-E505" and ("exists" in problem.message or "Not a directory" in problem.message)
    assert str(tmp_path / "file") in problem.place


class Counted(list):
    """A rank's parts that count how often they are looked at."""

    asked = 0

    def __getitem__(self, number):
        Counted.asked += 1
        return super().__getitem__(number)

    def __iter__(self):
        Counted.asked += len(self)
        return super().__iter__()


@pytest.mark.parametrize("dp", [1, 4])
def test_writers_are_chosen_by_asking_each_tensors_holders_alone(dp):
    """2,048 ranks with tensors of their own and dp copies of each: what is asked grows with what is held."""
    world, own = 2048, 8
    whole = Box.whole((2,))
    held = [
        Counted(TensorPart(f"layers.{rank // dp}.w{n}", (2,), "float32", whole) for n in range(own))
        for rank in range(world)
    ]
    Counted.asked = 0
    writers = choose_writers(held)
    assert Counted.asked <= 2 * world * own
    written = [sum(each) for each in writers.own]
    assert written == [own // dp] * world, "the load of copies is shared"
    assert sorted(part.name for part in writers.holders) == sorted({part.name for parts in held for part in parts})
    assert all(writers.own[rank][number] for (rank, number), *_ in writers.holders.values())
