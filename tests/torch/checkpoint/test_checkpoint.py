"""One process: what a checkpoint keeps, what it refuses, what it leaves behind."""

import json
import os
import shlex
import shutil

import pytest
import torch

from ppctl.checkpoint import load, read_state, save, verify
from ppctl.checkpoint.manifest import TensorRecord
from ppctl.checkpoint.replicas import Holding, elect_writers
from ppctl.checkpoint_folder import find, step_path
from ppctl.errors import CheckpointError

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


def blank(value=1.0):
    return {name: torch.full_like(tensor, -1.0) for name, tensor in tensors(value).items()}


def write(directory, step, value=None, *, keep=0):
    value = float(step) if value is None else value
    return save(directory, step, tensors(value), {**STATE, "step": step}, writer=True, keep=keep)


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
    assert names(path) == [".metadata", "__0_0.distcp", "manifest.json", "state.json"]


def test_a_parameter_is_filled_in_place_and_still_learns(tmp_path):
    parameter = torch.nn.Parameter(torch.zeros(3))
    path = save(tmp_path, 1, {"w": torch.arange(3.0)}, {}, writer=True, keep=0)
    load(path, {"w": parameter})
    (parameter * 2).sum().backward()
    assert parameter.tolist() == [0.0, 1.0, 2.0] and parameter.grad.tolist() == [2.0, 2.0, 2.0]


def test_both_uses_of_a_tied_weight_are_stored_once_and_filled_both(tmp_path):
    embedding, output = torch.ones(4, 2), torch.ones(4, 2)
    path = save(tmp_path, 1, {"model.tok_embeddings.weight": [embedding, output]}, {}, writer=True, keep=0)
    first, second = torch.zeros(4, 2), torch.zeros(4, 2)
    load(path, {"model.tok_embeddings.weight": [first, second]})
    assert torch.equal(first, embedding) and torch.equal(second, output)
    assert list(verify(path).tensors) == ["model.tok_embeddings.weight"]


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path):
    path = save(tmp_path, 1, {"w": torch.zeros(1_000_000)[:10]}, {}, writer=True, keep=0)
    assert (path / "__0_0.distcp").stat().st_size < 10_000


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


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: flip(path / "__0_0.distcp"), "__0_0.distcp has changed"),
        (lambda path: flip(path / "__0_0.distcp", 300), "__0_0.distcp has changed"),
        (lambda path: os.truncate(path / "__0_0.distcp", 1000), "__0_0.distcp has 1000 bytes instead of"),
        (lambda path: flip(path / ".metadata"), ".metadata has changed"),
        (lambda path: (path / ".metadata").unlink(), ".metadata is missing"),
        (lambda path: flip(path / "state.json"), "state.json has changed"),
        (lambda path: os.truncate(path / "manifest.json", 100), "manifest.json cannot be read"),
        (lambda path: (path / "manifest.json").write_text("[]"), "manifest.json cannot be read"),
    ],
    ids=["flipped bit", "flipped early", "truncated", "metadata", "no metadata", "state", "manifest", "not a manifest"],
)
def test_a_damaged_file_is_named(tmp_path, damage, said):
    path = write(tmp_path, 2)
    damage(path)
    for call in (lambda: verify(path), lambda: load(path, blank())):
        (problem,) = refused(call)
        assert problem.code == "PP-E503" and said in problem.message, problem.message


def test_tensors_that_were_exchanged_within_valid_files_are_caught_by_their_own_digests(tmp_path):
    path = write(tmp_path, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    records = manifest["tensors"]
    records["optim.norm.weight.exp_avg"]["sha256"] = records["empty"]["sha256"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    (problem,) = refused(load, path, blank())
    assert problem.code == "PP-E503" and problem.place == "optim.norm.weight.exp_avg"


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda path: None, "PP-E501"),
        (lambda path: path.mkdir(), "PP-E501"),
        (lambda path: path.write_text(""), "PP-E501"),
        (lambda path: (path.mkdir(), (path / "manifest.json").write_text('{"format": 99}')), "PP-E509"),
    ],
    ids=["nothing", "an empty directory", "a file", "another format"],
)
def test_what_is_no_checkpoint_is_refused(tmp_path, make, code):
    make(tmp_path / "step-1")
    for call in (read_state, verify, lambda path: load(path, blank())):
        (problem,) = refused(call, tmp_path / "step-1")
        assert problem.code == code


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
    (tmp_path / "step-2.tmp" / "__0_0.distcp").write_text("half")
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
    (problem,) = refused(save, tmp_path, 1, {"a": torch.ones(1), "tied": tied}, {}, writer=True, keep=0)
    assert (problem.code, problem.place) == ("PP-E504", "tied") and not list(tmp_path.iterdir())


def test_a_tensor_that_nobody_writes_is_refused(tmp_path):
    (problem,) = refused(save, tmp_path, 1, {"a": torch.ones(1)}, {}, writer=False, keep=0)
    assert (problem.code, problem.place) == ("PP-E506", "a")


@pytest.mark.parametrize("place", ["checkpoints", "."], ids=["the directory is a file", "its parent is a file"])
def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path, place):
    (tmp_path / "file").write_text("")
    directory = tmp_path / "file" if place == "checkpoints" else tmp_path / "file" / "checkpoints"
    (problem,) = refused(write, directory, 1)
    assert problem.code == "PP-E505" and ("exists" in problem.message or "Not a directory" in problem.message)
    assert str(tmp_path / "file") in problem.place


class Counted(dict):
    """A rank's records that count how often they are asked."""

    asked = 0

    def __getitem__(self, name):
        Counted.asked += 1
        return super().__getitem__(name)

    def get(self, name, default=None):
        Counted.asked += 1
        return super().get(name, default)


@pytest.mark.parametrize("dp", [1, 4])
def test_writers_are_elected_by_asking_each_tensors_holders_alone(dp):
    """2,048 ranks with tensors of their own and dp copies of each: what is asked grows with what is held."""
    world, own = 2048, 3
    record = TensorRecord((2,), "float32", "a" * 64)
    Counted.asked = 0
    holdings = [
        Holding(Counted({f"layers.{rank // dp}.w{n}": (record,) for n in range(own)}), writer=rank % dp == 0)
        for rank in range(world)
    ]
    writers, records = elect_writers(holdings)
    assert Counted.asked <= 2 * world * own
    assert writers == {f"layers.{rank}.w{n}": rank * dp for rank in range(world // dp) for n in range(own)}
    assert set(records) == set(writers)
