"""Steps whose gradient norm is bad: their updates are left out, or the run stops; all cuts decide alike."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from dense_runs import config_of, session_of, trainer_of
from one_save import save_checkpoint
from ranks import RanksFailed, run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.errors import TrainingError
from ppctl.train import bad_steps
from ppctl.train.snapshot import load_checkpoint

FACTOR = 1.01
"""Norms of a tiny model's first steps vary by more."""


def mapping_of(text: Path, *, pp: int, **changes: object) -> dict:
    config = config_of(text, pp=pp, vpp=1, m=4)
    config.train.steps = 12
    for name, value in changes.items():
        setattr(config.train, name, value)
    return to_mapping(config)


def steps_of(mapping: dict, first: int, last: int, directory: str | None = None) -> tuple[list[dict], dict]:
    """Steps `first` to `last`, from the checkpoint of the first, with one behind the last: (records, masters)."""
    bad_steps.NEEDED = 3
    session = session_of(mapping)
    if first:
        load_checkpoint(session, Path(directory) / f"step-{first}")
    trainer = trainer_of(session, first)
    records = [trainer.step(step).record for step in range(first, last)]
    if directory is not None:
        save_checkpoint(session, Path(directory), last, last * session.config.train.global_batch_size)
    return records, {name: p.detach().clone() for name, p in session.replica.weights.master.items()}


def told(records: list[dict]) -> list[tuple]:
    return [(r["loss"], r["grad_norm"], r["lr"], r["skipped"]) for r in records]


def test_spikes_are_left_out_alike_in_every_cut_and_through_a_checkpoint(text: Path, tmp_path: Path) -> None:
    bad = {"on_bad_step": "skip", "spike_factor": FACTOR}
    ((records, whole),) = run_ranks(steps_of, 1, mapping_of(text, pp=1, **bad), 0, 12)
    skipped = [record["skipped"] for record in records]
    assert not any(skipped[:3]) and 1 <= sum(skipped) <= 8
    good: list[float] = []
    for record in records:
        limit = FACTOR * sorted(good)[len(good) // 2] if len(good) % 2 else None
        if limit is not None and len(good) >= 3:
            assert record["skipped"] == (record["grad_norm"] > torch.tensor(limit).item())
        good += [] if record["skipped"] else [record["grad_norm"]]
    divided: list[dict] = []
    for (first, last), pp in zip([(0, 5), (5, 9), (9, 12)], [2, 1, 2], strict=True):
        answers = run_ranks(steps_of, pp, mapping_of(text, pp=pp, **bad), first, last, str(tmp_path))
        divided += answers[0][0]
    assert told(divided) == told(records)
    together = {name: value for _, masters in answers for name, value in masters.items()}
    assert all(torch.equal(together[name], whole[name]) for name in whole)


def test_an_update_that_is_left_out_changes_nothing(text: Path) -> None:
    bad = {"on_bad_step": "skip", "spike_factor": FACTOR}
    ((records, _),) = run_ranks(steps_of, 1, mapping_of(text, pp=1, **bad), 0, 12)
    first = next(i for i, record in enumerate(records) if record["skipped"])
    ((_, before),) = run_ranks(steps_of, 1, mapping_of(text, pp=1, **bad), 0, first)
    ((_, behind),) = run_ranks(steps_of, 1, mapping_of(text, pp=1, **bad), 0, first + 1)
    assert all(torch.equal(before[name], behind[name]) for name in before)


def test_a_spike_stops_the_run_unless_it_is_to_be_skipped(text: Path) -> None:
    with pytest.raises(RanksFailed, match=r"PP-E733: step \d+: the gradient norm .* is above .*train.spike_factor"):
        run_ranks(steps_of, 2, mapping_of(text, pp=2, spike_factor=FACTOR), 0, 12)


def poisoned(mapping: dict) -> tuple[list[bool], list[float], str]:
    """What a run with a weight that is no number does: (skipped, losses, the error)."""
    session = session_of(mapping)
    name = next(iter(session.replica.weights.master))
    with torch.no_grad():
        session.replica.weights.master[name].fill_(math.nan)
    session.replica.weights.publish()
    trainer, records = trainer_of(session), []
    try:
        for step in range(12):
            records.append(trainer.step(step).record)
    except TrainingError as error:
        return [r["skipped"] for r in records], [r["loss"] for r in records], str(error)
    raise AssertionError("it went on")


def test_no_more_than_ten_in_a_row_are_left_out(text: Path) -> None:
    """Their losses are no numbers either."""
    answers = run_ranks(poisoned, 2, mapping_of(text, pp=2, on_bad_step="skip"))
    for skipped, losses, error in answers:
        assert skipped == [True] * 10 and all(math.isnan(loss) for loss in losses)
        assert "PP-E733" in error and "step 11" in error and "10 steps before it were left out" in error
