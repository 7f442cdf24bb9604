"""`checkpoint.resume=auto`: the newest checkpoint that is not damaged, which one and why; never step 0 in silence."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from evaluated_runs import config_of, text
from observed_runs import train_noted
from ranks import RanksFailed, run_ranks

from ppctl.checkpoint.manifest import read_manifest
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan.build import build_plan
from ppctl.runs.checkpoint_folder import AUTO, candidates
from ppctl.train.session import build_session

__all__ = ["text"]


def go_on(mapping: dict, directory: str) -> tuple[list[float], list[str]]:
    """In a rank: the losses of the steps that were still to do, and the lines for the user."""
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    lines: list[str] = []
    _, notes = train_noted(
        session,
        Path(directory),
        candidates=partial(candidates, config.checkpoint.resume, Path(directory)),
        say=lambda line: None if line.startswith(("saved", "saving")) else lines.append(line),
    )
    return [record["loss"] for record in notes.records], lines


@pytest.fixture(scope="module")
def mapping(text: Path) -> dict:
    config = config_of(text, pp=2)
    config.checkpoint.interval, config.checkpoint.keep, config.checkpoint.resume = 1, 0, AUTO
    config.train.steps = 4
    return to_mapping(config)


@pytest.fixture(scope="module")
def whole(mapping: dict, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[float]]:
    directory = tmp_path_factory.mktemp("whole")
    (losses, lines), other = run_ranks(go_on, 2, mapping, str(directory))
    assert lines == ["note: checkpoint.resume=auto: there is no checkpoint yet, and the run begins at step 0"]
    assert other[1] == [] and len(losses) == 4
    return directory, losses


def flip(path: Path) -> None:
    """A bit of the last value of rank 1's file."""
    file = path / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "a flipped bit": (flip, "rank-00001.safetensors has changed since it was written: bytes"),
    "no file of rank 1": (
        lambda path: (path / "rank-00001.safetensors").unlink(),
        "rank-00001.safetensors is missing",
    ),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "is not a checkpoint"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_start_goes_back_over_damaged_checkpoints_and_says_so(
    mapping: dict, whole: tuple[Path, list[float]], tmp_path: Path, damage: str
) -> None:
    directory, losses = whole
    copy = shutil.copytree(directory, tmp_path / "checkpoints")
    spoil, said = DAMAGE[damage]
    spoil(copy / "step-4")
    flip(copy / "step-3")
    (again, lines), (_, others) = run_ranks(go_on, 2, mapping, str(copy))
    assert again == losses[2:] and others == []
    assert [line.rpartition("; ")[2] for line in lines] == [
        "going on from step-3 instead",
        "going on from step-2 instead",
    ]
    assert said in lines[0] and str(copy / "step-4") in lines[0] and lines[0].startswith("warning: ")
    assert (copy / "latest").read_text() == "step-4\n"
    assert read_manifest(copy / "step-4").tensors.keys() == read_manifest(directory / "step-4").tensors.keys()


def test_where_all_are_damaged_nothing_begins_anew(
    mapping: dict, whole: tuple[Path, list[float]], tmp_path: Path
) -> None:
    copy = shutil.copytree(whole[0], tmp_path / "checkpoints")
    for step in range(1, 5):
        flip(copy / f"step-{step}")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(go_on, 2, mapping, str(copy))
    assert all("PP-E503" in failure.message and "step-1" in failure.message for failure in caught.value.failures)
