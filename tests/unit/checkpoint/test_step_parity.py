"""Two runs' kept steps compared: what differs is named with its stage and ranks, and what may differ is not."""

import json

import numpy as np
import pytest

from ppctl.checkpoint import disk
from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.step_parity import (
    Handed,
    KeptStep,
    Side,
    compare_step,
    forget_step,
    kept_steps,
    step_directory,
    write_messages,
)
from ppctl.checkpoint.tensor_parts import TensorPart
from ppctl.errors import CheckpointError
from ppctl.topology import ParallelSizes

A, B = np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6), np.arange(5, dtype=np.float32)


def kept(path, ranks, handed=()):
    """A step 1 as ranks keep it: for each a list of (name, whole, offset, values)."""
    directory = step_directory(path, 1)
    directory.mkdir(parents=True)
    for rank, parts in enumerate(ranks):
        described = [TensorPart(f"gradient.{n}", w, "float32", Box(o, v.shape)) for n, w, o, v in parts]
        values = (np.ascontiguousarray(v).reshape(-1).view(np.uint8).data for *_, v in parts)
        disk.write_file(directory / disk.file_name(rank), described, values)
    write_messages(directory, list(handed))
    return KeptStep(path, 1)


def side(step, **sizes):
    world = np.prod(list(sizes.values()), dtype=int).item() if sizes else 1
    tp = sizes.get("tp", 1)
    return Side(step, ParallelSizes(world, etp=tp, edp=world // sizes.get("pp", 1) // tp, **sizes), False, 1)


def of(name):
    return (0, 0) if name == "a" else (1, "abc".index(name))


@pytest.fixture
def one(tmp_path):
    return side(kept(tmp_path / "one", [[("a", A.shape, (0, 0), A), ("b", B.shape, (0,), B)]]))


def test_equal_parts_on_two_ranks_are_the_whole(one, tmp_path):
    halves = [[("a", A.shape, (0, 3 * r), A[:, 3 * r : 3 * r + 3]), ("b", B.shape, (0,), B)] for r in range(2)]
    found = compare_step(one, side(kept(tmp_path / "cut", halves), tp=2), tolerance=0.0, place_of=of)
    assert found.same
    assert (found.equal, found.largest) == (2, 0.0)
    assert kept_steps(tmp_path / "cut") == [1]


def test_one_bit_of_one_copy_is_named_with_its_rank_and_place(one, tmp_path):
    other = A.copy()
    other[2, 1] = np.nextafter(other[2, 1], np.float32(2))
    ranks = [[("a", A.shape, (0, 0), each), ("b", B.shape, (0,), B)] for each in (A, other)]
    cut = side(kept(tmp_path / "cut", ranks), dp=2)
    found = compare_step(one, cut, tolerance=0.0, place_of=of)
    (wrong,) = found.parameters
    assert (wrong.name, wrong.stage, wrong.ranks, wrong.of, wrong.at) == ("a", 0, [1], 2, (2, 1))
    assert 0 < wrong.relative < 1e-6
    assert compare_step(one, cut, tolerance=1e-6, place_of=of).same


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.5])
def test_beyond_the_tolerance_and_numbers_that_are_none_differ(one, tmp_path, value):
    other = B.copy()
    other[0] = value
    cut = side(kept(tmp_path / "cut", [[("a", A.shape, (0, 0), A), ("b", B.shape, (0,), other)]]))
    found = compare_step(one, cut, tolerance=1e-6, place_of=of)
    assert [each.name for each in found.parameters] == ["b"]


def test_names_that_one_lacks_and_uses_that_are_not_alike_are_differences(one, tmp_path):
    cut = side(kept(tmp_path / "cut", [[("a", A.shape, (0, 0), A), ("c", A.shape, (0, 0), 2 * A)]]))
    found = compare_step(one, cut, tolerance=0.0, place_of=of, uses=("a", "c"))
    assert (found.missing, found.unlike, found.same) == (["b", "c"], [("B", "c", "a")], False)


def test_the_first_parameter_is_the_one_whose_gradient_a_backward_makes_first(one, tmp_path):
    ours, theirs = ([[(n, B.shape, (0,), k * B) for n in "abc"]] for k in (1, 2))
    sides = [side(kept(tmp_path / name, parts)) for name, parts in (("ours", ours), ("theirs", theirs))]
    found = compare_step(*sides, tolerance=0.0, place_of=of)
    assert [(each.name, each.stage) for each in found.parameters] == [("c", 1), ("b", 1), ("a", 0)]


def test_a_step_that_is_done_again_on_fewer_ranks_has_nothing_of_the_earlier_start(tmp_path):
    kept(tmp_path / "run", [[("a", A.shape, (0, 0), A)], [("b", B.shape, (0,), B)]])
    forget_step(tmp_path / "run", 1)
    assert kept_steps(tmp_path / "run") == [] and list(step_directory(tmp_path / "run", 1).iterdir()) == []
    forget_step(tmp_path / "run", 2)


def handed(*squares, forward=True, stage=0, bits=7):
    return [Handed(rank, forward, stage, 3, (0, bits), value) for rank, value in enumerate(squares)]


def test_the_first_action_is_the_one_that_the_others_follow_from(tmp_path):
    ours = [*handed(4.0), *handed(9.0, stage=1), *handed(1.0, forward=False, stage=1)]
    theirs = [*handed(4.0), *handed(9.9, stage=1, bits=8), *handed(1.2, forward=False, stage=1, bits=9)]
    first, second = (side(kept(tmp_path / n, [[]], each)) for n, each in (("a", ours), ("b", theirs)))
    found = compare_step(first, second, tolerance=0.0, place_of=of)
    assert (found.action.action, found.action.stage, found.action.ranks) == ("1F3", 1, [0])
    assert found.action.relative == pytest.approx(0.05)
    assert compare_step(first, first, tolerance=0.0, place_of=of).same


def test_copies_and_parts_of_a_message_are_one_message(tmp_path):
    whole = side(kept(tmp_path / "a", [[]], handed(4.0)))
    copied = side(kept(tmp_path / "b", [[], []], handed(4.0, 4.0, bits=8)), tp=2)
    parted = copied._replace(step=kept(tmp_path / "c", [[], []], handed(1.0, 3.0, bits=8)), sequence_parallel=True)
    wrong = copied._replace(step=kept(tmp_path / "d", [[], []], handed(4.0, 3.0, bits=8)))
    for each, same in ((copied, True), (parted, True), (wrong, False)):
        assert compare_step(whole, each, tolerance=1e-6, place_of=of).same == same


def test_a_gradient_of_another_shape_is_a_difference(one, tmp_path):
    flat = A.reshape(-1)
    cut = side(kept(tmp_path / "cut", [[("a", flat.shape, (0,), flat), ("b", B.shape, (0,), B)]]))
    assert compare_step(one, cut, tolerance=0.0, place_of=of).missing == ["a"]


@pytest.mark.parametrize("offset", [(10**12, 10**12), (-1, 0), (0,)])
def test_a_part_that_is_none_of_its_gradient_is_refused(tmp_path, offset):
    """An array up to where it ends would not fit into memory."""
    (directory := step_directory(tmp_path, 1)).mkdir()
    part = TensorPart("gradient.a@" + ",".join(map(str, offset)), A.shape, "float32", Box((0, 0), A.shape))
    disk.write_file(directory / disk.file_name(0), [part], [A.reshape(-1).view(np.uint8).data])
    write_messages(directory, [])
    with pytest.raises(CheckpointError, match="PP-E645"):
        KeptStep(tmp_path, 1)


def message(squares):
    return json.dumps({"version": 1, "messages": [[0, True, 0, 0, [0, 7], squares]]})


@pytest.mark.parametrize("damage", ["{", "[]", '{"messages": [[0]]}', "[" * 10**5, message("x"), message(10**400)])
def test_a_damaged_step_is_refused(one, damage):
    (one.step.path / "messages.json").write_text(damage)
    with pytest.raises(CheckpointError) as error:
        KeptStep(one.step.path.parent, 1)
    assert error.value.problems[0].code == "PP-E645"
