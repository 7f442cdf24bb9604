"""The mean of several checkpoints' weights, which training and exports take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from array_checkpoints import arrays, save
from hugging_face_models import hugging_face_model
from verified import verify

from ppctl.checkpoint.manifest import read_manifest
from ppctl.checkpoint.reading import CheckpointReader
from ppctl.checkpoint.run_state import read_state
from ppctl.cli.main import main
from ppctl.errors import CheckpointError, ConfigError
from ppctl.pretrained.command import average
from ppctl.pretrained.hugging_face import export_checkpoint, import_directory


def silent(*_: object) -> None:
    """Progress that nobody watches."""


def test_weights_are_averaged_in_float64_and_rounded_once(tmp_path: Path) -> None:
    sources = [save(tmp_path / str(seed), 2, arrays(seed), ranks=seed + 1) for seed in (0, 1, 2)]
    done = average(sources, tmp_path / "mean", silent)
    assert verify(done.path).tensors.keys() == {name for name in arrays() if name.startswith("model.")}
    reader = CheckpointReader(done.path, read_manifest(done.path))
    for name in read_manifest(done.path).tensors:
        values = [arrays(seed)[name] for seed in (0, 1, 2)]
        expected = (sum(value.astype(np.float64) for value in values) / 3).astype(values[0].dtype)
        assert reader.tensor(name).float().numpy().tolist() == expected.astype(np.float32).tolist(), name
    state = read_state(done.path)
    assert state["averaged"] == [str(path) for path in sources] and state["weights_only"]


def test_one_alone_is_its_own_mean_to_the_bit(tmp_path: Path) -> None:
    source = save(tmp_path / "one", 2, arrays())
    done = average([source], tmp_path / "mean", silent)
    reader = CheckpointReader(done.path, read_manifest(done.path))
    assert (
        reader.tensor("model.layers.2.attention.wq.weight").numpy().tobytes() == next(iter(arrays().values())).tobytes()
    )


def test_other_shapes_dtypes_and_names_are_refused_by_name(tmp_path: Path) -> None:
    other = arrays(1)
    other["model.layers.2.attention.wq.weight"] = np.zeros((5, 6), np.float32)
    other["model.norm.weight"] = other["model.norm.weight"].astype(np.float32)
    other["model.more"] = other.pop("model.layers.10.attention.wq.weight")
    sources = [save(tmp_path / "one", 2, arrays()), save(tmp_path / "other", 2, other)]
    with pytest.raises(CheckpointError) as caught:
        average(sources, tmp_path / "mean", silent)
    (problem,) = caught.value.problems
    assert problem.code == "PP-E531" and problem.place.splitlines() == [
        "missing: model.layers.10.attention.wq.weight",
        "not in the first: model.more",
        "model.layers.2.attention.wq.weight: float32[5, 6], not float32[6, 5]",
        "model.norm.weight: float32[5], not bfloat16[5]",
    ]
    assert not (tmp_path / "mean").exists()


def test_whole_numbers_must_be_equal(tmp_path: Path) -> None:
    save(tmp_path / "a", 1, {"model.count": np.array([1, 2])})
    save(tmp_path / "b", 1, {"model.count": np.array([1, 3])})
    paths = [tmp_path / name / "step-1" for name in "aab"]
    assert average(paths[:2], tmp_path / "same", silent).tensors == 1
    with pytest.raises(CheckpointError, match="holds int64, which have no mean"):
        average(paths, tmp_path / "mean", silent)


def test_a_mean_is_exported_and_a_place_that_is_taken_is_left_alone(tmp_path: Path) -> None:
    sources = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        hugging_face_model("qwen3").save_pretrained(tmp_path / f"theirs-{seed}")
        sources.append(import_directory(tmp_path / f"theirs-{seed}", tmp_path / f"ours-{seed}", silent).path)
    assert main(["ckpt", "average", *map(str, sources), "--out", str(tmp_path / "mean")]) == 0
    assert export_checkpoint(tmp_path / "mean" / "checkpoints" / "step-0", tmp_path / "back", silent).family == "qwen3"
    with pytest.raises(ConfigError):
        average(sources, tmp_path / "mean", silent)
