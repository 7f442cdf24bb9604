"""`train.on_bad_step=rollback:N`: the run goes back to a checkpoint and passes the samples of the bad span by, as a run
that never had them, in any cut, through deaths at both sides of the note, and in starts that follow."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from command import TINY, environment, metrics, only_run, ppctl
from dense_runs import config_of, session_of
from ranks import RanksFailed, run_ranks

from ppctl.config.mapping import to_mapping
from ppctl.runs import checkpoint_folder
from ppctl.runs.checkpoint_folder import AUTO, FoundCheckpoint, candidates, find, steps_back
from ppctl.train.callback import Callback, Callbacks, Start, StepResult, TrainingRun
from ppctl.train.loop import train
from ppctl.train.saving import Saves

STEPS, SAMPLES, BACK = 10, 8, 2
"""A checkpoint every second step: behind the bad step 7, the newest that is two steps older is step 4."""
SPAN = (4 * SAMPLES, 7 * SAMPLES)


def mapping_of(text: Path, *, pp: int, steps: int = STEPS, **changes: object) -> dict:
    config = config_of(text, pp=pp, vpp=1, m=4)
    config.train.steps, config.train.on_bad_step = steps, f"rollback:{BACK}"
    config.checkpoint.interval, config.checkpoint.keep = 2, 0
    for name, value in changes.items():
        section, _, field = name.partition("__")
        setattr(getattr(config, section), field, value)
    return to_mapping(config)


class Follower(Callback):
    """Makes the gradients of some steps bad, as often as it is told, and notes what is read and what comes of it."""

    def __init__(self, poisons: dict[int, int]) -> None:
        self.poisons, self.records = dict(poisons), []

    def pre_train(self, run: TrainingRun) -> None:
        self.weights = run.session.replica.weights

    def pre_update(self, step: int) -> None:
        if self.poisons.get(step):
            self.poisons[step] -= 1
            for master in self.weights.master.values():
                master.grad.fill_(math.nan)

    def post_step(self, result: StepResult) -> None:
        names = ("step", "loss", "grad_norm", "lr", "skipped", "consumed_samples")
        record = {name: result.record[name] for name in names}
        self.records.append(record | {"back_to": None if result.start is None else result.start.step})


def life(
    mapping: dict, directory: str, poisons: dict[int, int], resume: str | None = None, dies: str = ""
) -> tuple[list[dict], dict, list[str]]:
    """One life of a run: its records, masters, and lines; it `dies` before or after the note of a step back."""
    session, lines, own = session_of(mapping), [], Path(directory) / "checkpoints"
    follower, note = Follower(poisons), checkpoint_folder.add_step_back

    def dying(*arguments: Any) -> None:
        if dies == "after":
            note(*arguments)
        os._exit(3)

    checkpoint_folder.add_step_back = dying if dies else note
    saves = Saves(session, own, say=lines.append)
    train(session, saves.start(partial(candidates, resume, own)), Callbacks(saves, follower))
    return follower.records, {n: p.detach().clone() for n, p in session.replica.weights.master.items()}, lines


def without_span(mapping: dict) -> tuple[list[dict], dict]:
    """A run that passes the span by from its beginning, and has no bad step."""
    session, follower = session_of(mapping), Follower({})
    train(session, Start(passed=(SPAN,)), follower)
    return follower.records, dict(session.replica.weights.master)


@pytest.fixture(scope="module")
def expected(text: Path) -> tuple[list[dict], dict]:
    ((records, masters),) = run_ranks(without_span, 1, mapping_of(text, pp=1))
    return records, masters


def hold(answers: Iterable[tuple], expected: tuple[list[dict], dict], first: int = 1) -> None:
    """The records from step `first` on, after the step back if there was one, and all weights are the expected ones."""
    together: dict[str, torch.Tensor] = {}
    for records, masters, _ in answers:
        behind = 1 + max((i for i, record in enumerate(records) if record["back_to"] is not None), default=-1)
        assert records[behind:] == [record for record in expected[0] if record["step"] >= first]
        together |= masters
    assert together.keys() == expected[1].keys()
    assert all(torch.equal(together[name], expected[1][name]) for name in together)


@pytest.mark.parametrize("pp", [pytest.param(1, marks=pytest.mark.whole), 2])
def test_the_run_goes_on_as_one_that_never_had_the_span(text: Path, tmp_path: Path, expected: tuple, pp: int) -> None:
    answers = run_ranks(life, pp, mapping_of(text, pp=pp), str(tmp_path), {7: 1})
    hold(answers, expected, 5)
    records = answers[0][0]
    assert [record["step"] for record in records] == [1, 2, 3, 4, 5, 6, 7, 5, 6, 7, 8, 9, 10]
    assert records[6]["skipped"] is True and records[6]["back_to"] == 4 and records[6]["consumed_samples"] == SPAN[1]
    assert records[7]["lr"] == records[4]["lr"], "the rate follows updates, as the step's number does"
    folder = tmp_path / "checkpoints"
    assert steps_back(folder) == [(7, 4, *SPAN)]
    assert find(folder) == FoundCheckpoint(folder / "step-10")
    assert json.loads((folder / "step-6/state.json").read_text())["consumed_samples"] == 9 * SAMPLES
    assert "back to step 4; samples 32 to 55 are not read again" in answers[0][2]


@pytest.mark.parametrize(("dies", "poisons"), [("before", {7: 1}), ("after", {})])
def test_whoever_dies_beside_the_note_goes_on_alike_in_another_cut(
    text: Path, tmp_path: Path, expected: tuple, dies: str, poisons: dict[int, int]
) -> None:
    """Before the note nothing has happened: the start reads step 6, and meets the same bad step. Behind it no start
    reads step 6, although `latest` names it."""
    with pytest.raises(RanksFailed):
        run_ranks(life, 1, mapping_of(text, pp=1), str(tmp_path), {7: 1}, None, dies)
    folder = tmp_path / "checkpoints"
    assert (folder / "latest").read_text() == "step-6\n"
    assert find(folder).path.name == ("step-6" if dies == "before" else "step-4")
    assert [each.path.name for each in candidates(AUTO, folder)][-2:] == ["step-4", "step-2"]
    answers = run_ranks(life, 2, mapping_of(text, pp=2), str(tmp_path), poisons, AUTO)
    hold(answers, expected, 5)
    assert len(steps_back(folder)) == 1


@pytest.mark.whole
def test_copies_in_memory_of_the_span_are_given_up_with_it(text: Path, tmp_path: Path, expected: tuple) -> None:
    mapping = mapping_of(text, pp=1, checkpoint__local=str(tmp_path / "memory"), checkpoint__local_every=1)
    with pytest.raises(RanksFailed):
        run_ranks(life, 1, mapping, str(tmp_path), {7: 1}, None, "after")
    hold(run_ranks(life, 1, mapping, str(tmp_path), {}, AUTO), expected, 5)


@pytest.mark.whole
def test_starts_from_an_earlier_checkpoint_pass_the_span_by_when_they_reach_it(
    text: Path, tmp_path: Path, expected: tuple
) -> None:
    """In another run's directory, too, whose checkpoints say so themselves, and behind a damaged checkpoint."""
    run_ranks(life, 1, mapping_of(text, pp=1, steps=8), str(tmp_path / "a"), {7: 1})
    fork = str(tmp_path / "a/checkpoints/step-2")
    run_ranks(life, 1, mapping_of(text, pp=1, steps=3), str(tmp_path / "b"), {}, fork)
    state = json.loads((tmp_path / "b/checkpoints/step-3/state.json").read_text())
    assert state["passed"] == [list(SPAN)] and not (tmp_path / "b/checkpoints/passed.json").exists()
    hold(run_ranks(life, 1, mapping_of(text, pp=1), str(tmp_path / "b"), {}, AUTO), expected, 4)
    for path in (tmp_path / "a/checkpoints").glob("step-[4-8]/*.safetensors"):
        path.write_bytes(b"damaged")
    answers = run_ranks(life, 1, mapping_of(text, pp=1), str(tmp_path / "a"), {}, AUTO)
    hold(answers, expected, 3)
    assert any("going on from step-2" in line for line in answers[0][2])


@pytest.mark.parametrize(
    ("poisons", "says"),
    [
        ({7: 99}, "step 7 is bad, and the run has gone back to step-4 5 times"),
        pytest.param({3: 1}, "step 3 is bad, and no checkpoint is 2 or more steps before it", marks=pytest.mark.whole),
    ],
)
def test_a_run_that_cannot_go_back_stops(text: Path, tmp_path: Path, poisons: dict[int, int], says: str) -> None:
    with pytest.raises(RanksFailed, match=f"PP-E736: {says}"):
        run_ranks(life, 2, mapping_of(text, pp=2), str(tmp_path), poisons)


@pytest.mark.whole
def test_a_run_goes_back_over_a_step_back(text: Path, tmp_path: Path) -> None:
    """Step 7, and behind it again the same step, before a checkpoint was saved: one span from step 4 on."""
    (records, _, _), *_ = run_ranks(life, 1, mapping_of(text, pp=1), str(tmp_path), {7: 2})
    assert [record["consumed_samples"] for record in records if record["back_to"]] == [7 * SAMPLES, 10 * SAMPLES]
    assert records[-1]["consumed_samples"] == 16 * SAMPLES
    assert steps_back(tmp_path / "checkpoints") == [(7, 4, *SPAN), (7, 4, 4 * SAMPLES, 10 * SAMPLES)]


OWN = """
import ppctl

class Poison(ppctl.Callback):
    left = 1

    def pre_train(self, run):
        self.weights = run.session.replica.weights

    def pre_update(self, step):
        if step == 7 and self.left:
            self.left = 0
            for master in self.weights.master.values():
                master.grad.fill_(float("inf"))
"""


@pytest.mark.whole
def test_a_person_sees_the_step_back(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = ("train", "+recipe=quickstart", *TINY, "pp=2", "vpp=1", "layout=null", "log.interval=1", "train.steps=10")
    words += ("train.on_bad_step=rollback:2", "checkpoint.interval=2", "train.callbacks=[own:Poison]")
    run = ppctl(*words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{environment()['PYTHONPATH']}")
    assert run.returncode == 0, run.stdout + run.stderr
    assert "back to step 4; samples 32 to 55 are not read again" in run.stdout
    assert "PP-E826: step 7" in (only_run(tmp_path) / "logs/rank-0000.log").read_text()
    records = metrics(only_run(tmp_path))
    assert [record["step"] for record in records] == list(range(1, 11))
    assert [record["consumed_samples"] for record in records] == [8, 16, 24, 32, 64, 72, 80, 88, 96, 104]
    for words in (("status",), ("runs", "show")):
        shown = " ".join(ppctl(*words, str(only_run(tmp_path)), cwd=tmp_path).stdout.split())
        assert "7 to 4 (without samples 32 to 55)" in shown
