"""`ckpt diff` of a checkpoint of format 1, whose values torch alone reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ppctl import checkpoint
from ppctl.checkpoint import CheckpointReader, read_manifest, whole_shards
from ppctl.cli.main import main

OLD = Path(__file__).parents[2] / "golden" / "checkpoint" / "step-3"


def test_a_checkpoint_of_format_1_is_compared_with_one_of_format_2(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    reader = CheckpointReader(OLD, read_manifest(OLD))
    values = {name: reader.tensor(name).clone() for name in reader.manifest.tensors}
    checkpoint.save(tmp_path / "same", 3, whole_shards(values), {}, keep=0)
    name = next(name for name, value in values.items() if value.dim() == 2)
    values[name][1, 0] += 0.5
    checkpoint.save(tmp_path / "other", 3, whole_shards(values), {}, keep=0)
    assert main(["ckpt", "diff", str(OLD), str(OLD)]) == 0
    assert main(["ckpt", "diff", str(OLD), str(tmp_path / "same" / "step-3")]) == 0
    capfd.readouterr()
    assert main(["ckpt", "diff", str(tmp_path / "other" / "step-3"), str(OLD), "--json"]) == 1
    (found,) = json.loads(capfd.readouterr().out)["different"]
    assert (found["name"], found["different"], found["at"], found["largest"]) == (name, 1, [1, 0], 0.5)
