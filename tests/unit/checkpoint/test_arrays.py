"""Tensors as numpy's arrays, and what of two checkpoints differs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from array_checkpoints import arrays, save

from ppctl.checkpoint import arrays as reader_of_arrays
from ppctl.checkpoint.arrays import ArrayReader, bytes_to_compare, compare
from ppctl.checkpoint.boxes import Box
from ppctl.checkpoint.manifest import read_manifest

WQ = "model.layers.2.attention.wq.weight"


def reader(path: Path) -> ArrayReader:
    return ArrayReader(path, read_manifest(path))


def test_every_box_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = reader(save(tmp_path, 1, arrays(), ranks=4))
    for name, value in arrays().items():
        whole = found.box(name, Box.whole(value.shape))
        assert whole.dtype == value.dtype and whole.tobytes() == value.tobytes(), name
    assert (found.box(WQ, Box((2, 1), (3, 2))) == arrays()[WQ][2:5, 1:3]).all()


def test_equal_tensors_of_one_cut_are_not_read_and_of_two_cuts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = ArrayReader.box
    monkeypatch.setattr(ArrayReader, "box", lambda self, name, box: read.append(name) or original(self, name, box))
    one, same = (save(tmp_path / name, 1, arrays()) for name in ("one", "same"))
    other = save(tmp_path / "other", 1, arrays(), ranks=3)
    assert compare(reader(one), reader(same)).same and read == []
    found = compare(reader(one), reader(other))
    assert found.same and found.equal == len(arrays()) and set(read) >= {WQ}


@pytest.mark.parametrize("block", [1, 7, 2**22])
def test_differences_are_told_with_place_values_and_norms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    monkeypatch.setattr(reader_of_arrays, "_BLOCK", block)
    changed = arrays()
    changed[WQ] = changed[WQ].copy()
    changed[WQ][3, 4] += 3.0
    changed[WQ][5, 0] -= 4.0
    changed["model.layers.10.attention.wq.weight"] = np.zeros((6, 6), np.float32)
    changed["model.norm.weight"] = changed["model.norm.weight"].astype(np.float32)
    changed["model.new"] = changed.pop("optim.layers.2.attention.wq.weight.step")
    found = compare(reader(save(tmp_path / "a", 1, arrays())), reader(save(tmp_path / "b", 1, changed, ranks=3)))
    assert (found.missing, found.new) == (["optim.layers.2.attention.wq.weight.step"], ["model.new"])
    moved, reshaped, widened = found.different
    assert (moved.name, moved.different, moved.elements, moved.at) == (WQ, 2, 30, (3, 4))
    assert moved.norm == pytest.approx(5.0, rel=1e-6) and moved.largest == pytest.approx(4.0, rel=1e-6)
    assert moved.relative == pytest.approx(5.0 / np.linalg.norm(arrays()[WQ].astype(float)), rel=1e-6)
    assert moved.values == (float(arrays()[WQ][3, 4]), float(changed[WQ][3, 4]))
    assert reshaped.kinds == ("float32[6, 5]", "float32[6, 6]") and reshaped.elements == 0
    assert widened.kinds == ("bfloat16[5]", "float32[5]") and (widened.different, widened.norm) == (0, 0.0)
    assert not found.same and found.equal == len(arrays()) - 4


def test_bits_count_also_where_numbers_are_equal_or_none(tmp_path: Path) -> None:
    one, other = np.array([0.0, np.nan, np.inf], np.float32), np.array([-0.0, np.nan, 1.0], np.float32)
    paths = [save(tmp_path / name, 1, {"w": value}) for name, value in (("a", one), ("b", other))]
    (found,) = compare(*map(reader, paths)).different
    assert (found.different, found.at, found.largest) == (2, (0,), np.inf)


def test_names_are_sorted_by_the_numbers_in_them(tmp_path: Path) -> None:
    found = compare(reader(save(tmp_path / "a", 1, arrays())), reader(save(tmp_path / "b", 1, {"w": np.zeros(1)})))
    assert [name for name in found.missing if name.endswith("wq.weight")] == [WQ, "model.layers.10.attention.wq.weight"]


def test_progress_counts_the_bytes_that_are_read(tmp_path: Path) -> None:
    whole = arrays()
    changed = {name: value + 1 if name == WQ else value for name, value in whole.items()}
    one, other = (reader(save(tmp_path / name, 1, values)) for name, values in (("a", whole), ("b", changed)))
    done: list[int] = []
    compare(one, other, done.append)
    assert sum(done) == bytes_to_compare(one.manifest, other.manifest) == whole[WQ].nbytes
