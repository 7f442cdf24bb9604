"""A run keeps the order of samples that it began with: its checkpoints say which, and an older one says nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from evaluated_runs import config_of, text
from observed_runs import train_noted
from one_save import save_checkpoint
from ranks import RanksFailed, run_ranks

from ppctl.checkpoint.manifest import read_manifest, record_whole
from ppctl.checkpoint.run_state import read_state
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.plan.build import build_plan
from ppctl.runs.checkpoint_folder import MANIFEST, STATE, candidates
from ppctl.train.session import build_session

__all__ = ["text"]


def go_on(mapping: dict, directory: str, resume: str | None, sample_order: int | None) -> list[tuple[float, ...]]:
    """In a rank: (loss, held-out loss) of every step; from `resume`, or from a first checkpoint of that order."""
    config = from_mapping(mapping)
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))
    path = None if resume is None else Path(resume)
    if sample_order is not None:
        path = save_checkpoint(session, Path(directory), 0, 0, sample_order)
    given = None if path is None else str(path)
    _, notes = train_noted(session, Path(directory), candidates=lambda: candidates(given, Path(directory)))
    return [(record["loss"], record["eval_loss"]) for record in notes.records]


def losses(
    text: Path, directory: Path, resume: Path | None = None, sample_order: int | None = None, pp: int = 2
) -> Any:
    config = config_of(text, pp=pp, eval_interval=1, eval_steps=1)
    config.data.validation_split, config.checkpoint.interval, config.checkpoint.keep = 0.4, 2, 0
    return run_ranks(
        go_on, pp, to_mapping(config), str(directory), None if resume is None else str(resume), sample_order
    )[0]


def rewrite_state(path: Path, state: dict) -> None:
    """Give a checkpoint another state, and its manifest the digest of it."""
    (path / STATE).write_text(json.dumps(state))
    manifest = read_manifest(path)
    files = {**manifest.files, STATE: record_whole((path / STATE).read_bytes())}
    (path / MANIFEST).write_text(replace(manifest, files=files).to_text())


def test_a_checkpoint_of_an_older_ppctl_goes_on_in_its_own_order(text: Path, tmp_path: Path) -> None:
    new, old = losses(text, tmp_path / "new"), losses(text, tmp_path / "old", sample_order=1)
    assert all(ours != theirs for ours, theirs in zip(new, old, strict=True))
    middle = tmp_path / "old" / "step-2"
    state = read_state(middle)
    assert state.pop("sample_order") == 1
    rewrite_state(middle, state)  # as it was before there were two orders
    assert losses(text, tmp_path / "again", middle) == old[2:]
    assert losses(text, tmp_path / "other cut", middle, pp=1) == old[2:]
    assert read_state(tmp_path / "again" / "step-4")["sample_order"] == 1, "and so does what follows"
    assert losses(text, tmp_path / "newer", tmp_path / "new" / "step-2") == new[2:]
    assert read_state(tmp_path / "newer" / "step-4")["sample_order"] == 2


def test_an_order_of_a_later_ppctl_is_refused(text: Path, tmp_path: Path) -> None:
    losses(text, tmp_path / "run")
    middle = tmp_path / "run" / "step-2"
    rewrite_state(middle, read_state(middle) | {"sample_order": 3})
    with pytest.raises(RanksFailed, match=r"PP-E509.*follows version 3 of the order of samples, this ppctl knows 2"):
        losses(text, tmp_path / "again", middle)
