"""Samples that a run reads behind a checkpoint, in another cut: none is skipped, none comes twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from evaluated_runs import config_of
from observed_runs import train_noted
from ranks import run_ranks

from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.data.batches import Batches, StepBatch
from ppctl.plan.build import build_plan
from ppctl.runs.checkpoint_folder import candidates
from ppctl.train.session import build_session

STEPS, SAVED, SAMPLES = 6, 3, 8
Row = tuple[int, int, tuple[int, ...]]
"""Step, dp rank, tokens."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """No two samples are the same."""
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(" ".join(map(str, range(1000, 1400))))
    return path


def reading(mapping: dict[str, Any], directory: str, resume: str | None) -> list[Row]:
    """In a rank: every row that it reads for a step of training."""
    config, rows, step_of = from_mapping(mapping), [], Batches.step
    session = build_session(config, build_plan(config, {}), dist.get_rank(), torch.device("cpu"))

    def told(self: Batches, step: int) -> StepBatch:
        batch = step_of(self, step)
        rows.extend((step, self.dp_rank, tuple(row.tolist())) for row in batch.tokens.flatten(0, 1))
        return batch

    Batches.step = told
    try:
        train_noted(session, Path(directory), candidates=lambda: candidates(resume, Path(directory)))
    finally:
        Batches.step = step_of
    return rows


def read(text: Path, directory: Path, resume: Path | None, pp: int, dp: int) -> dict[int, list[tuple[int, ...]]]:
    """The rows of each step, over all dp ranks; the ranks of a pipeline read the same."""
    config = config_of(text, pp=pp, dp=dp, gbs=SAMPLES, steps=STEPS, micro_batch_size=1)
    config.data.validation_split, config.checkpoint.interval, config.checkpoint.keep = 0.0, SAVED, 0
    answers = run_ranks(reading, pp * dp, to_mapping(config), str(directory), resume and str(resume))
    rows = {row for answer in answers for row in answer}
    return {step: sorted(row for at, _, row in rows if at == step) for step in sorted({at for at, _, _ in rows})}


@pytest.mark.parametrize(("pp", "dp"), [(2, 1), (1, 4), (4, 2), (1, 1)])
def test_samples_behind_a_checkpoint_are_those_of_the_run_that_went_on(
    whole: tuple[Path, dict[int, list[tuple[int, ...]]]], text: Path, tmp_path: Path, pp: int, dp: int
) -> None:
    directory, samples = whole
    rest = read(text, tmp_path, directory / f"step-{SAVED}", pp, dp)
    assert rest == {step: samples[step] for step in range(SAVED, STEPS)}


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, list[tuple[int, ...]]]]:
    directory = tmp_path_factory.mktemp("whole")
    samples = read(text, directory, None, 2, 2)
    assert len({row for rows in samples.values() for row in rows}) == STEPS * SAMPLES, "none twice"
    return directory, samples
