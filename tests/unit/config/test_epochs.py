"""The length of a run in epochs: how many steps it is, and where that is known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command import TINY

from ppctl.cli.main import main
from ppctl.config.compose import compose, override
from ppctl.config.schema import RunConfig
from ppctl.data.indexed import IndexedWriter
from ppctl.launch.planning import counted_samples, planned

SMALL = ("+recipe=quickstart", *TINY, "layout=null", "pp=1", "vpp=1")


@pytest.fixture
def text(tmp_path: Path) -> str:
    """1,601 tokens: 100 samples of 16."""
    (tmp_path / "text.txt").write_text("x" * 1600)
    return f"data.path={tmp_path}/text.txt"


@pytest.mark.parametrize(
    ("words", "steps"), [(["train.epochs=3"], 37), (["train.epochs=0.5"], 6), (["train.epochs=1", "gbs=16"], 6)]
)
def test_epochs_are_as_many_whole_steps_as_their_samples_fill(text: str, words: list[str], steps: int) -> None:
    for for_training in (False, True):
        composed, plan, problems = planned([*SMALL, text, *words], for_training=for_training)
        assert problems == [] and plan is not None
        assert composed.config.train.steps == steps
        assert composed.provenance["train.samples"].endswith("of 100 samples")
        assert any(f"{steps} steps take" in derived.equation for derived in plan.derived)


def test_held_out_samples_are_not_among_them_and_a_weighted_blend_goes_on_until_all_have_come(
    text: str, tmp_path: Path
) -> None:
    composed = planned([*SMALL, text, "train.epochs=1", "data.validation_split=0.2"])[0]
    assert composed.config.train.samples == 80
    path = text.partition("=")[2]
    (tmp_path / "other.txt").write_text("y" * 160)
    composed = planned([*SMALL, f"data.path=[0.5,{path},0.5,{tmp_path}/other.txt]", "train.epochs=1"])[0]
    assert composed.config.train.samples == 200  # the ten samples of the other come ten times


@pytest.mark.parametrize("other", ["train.steps=50", "train.samples=80", "train.tokens=1e4"])
def test_another_length_beside_it_is_refused(text: str, other: str) -> None:
    problems = planned([*SMALL, text, "train.epochs=1", other])[2]
    assert [(each.code, each.remedy) for each in problems] == [("PP-E103", "train.epochs=null")]
    assert planned([*SMALL, text, "train.epochs=null", other])[2] == []


def test_data_that_cannot_be_read_are_refused_by_train_and_a_plan_says_that_it_knows_no_steps(tmp_path: Path) -> None:
    words = [*SMALL, f"data.path={tmp_path}/nothing.txt", "train.epochs=1"]
    composed, _, problems = planned(words)
    assert problems == [] and composed.config.train.samples is None
    (said,) = (line for line in composed.notes if "train.epochs" in line)
    assert said.endswith(f"cannot be read here; this plan has train.steps={composed.config.train.steps}")
    assert [each.code for each in planned(words, for_training=True)[2]] == ["PP-E401"]


def test_a_resumed_run_keeps_what_was_counted_until_it_is_asked_for_more(text: str) -> None:
    before = planned([*SMALL, text, "train.epochs=1"], for_training=True)[0]

    def again(*words: str) -> RunConfig:
        return override(before.config, before.provenance, words, count_samples=counted_samples).config

    assert again() == before.config
    assert again("train.epochs=2").train.steps == 25
    assert again("train.epochs=null", "train.samples=null", "train.steps=40").train.steps == 40


def test_of_a_mapped_file_the_index_says_it_however_large_it_is(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "big", np.dtype("<u2")) as writer:
        writer.add_document(np.zeros(3 * 2**22, dtype="<u2"))
    composed = planned([*SMALL, f"data.path={tmp_path}/big", "train.epochs=1"])[0]
    assert composed.config.train.samples == (3 * 2**22 - 1) // 16
    assert composed.provenance["train.steps"] == "derived: train.samples"


def test_who_composes_without_a_reader_of_data_is_told_that_no_steps_are_known(text: str) -> None:
    assert any(
        "train.epochs=1: the steps follow from data" in line for line in compose([*SMALL, text, "train.epochs=1"]).notes
    )


@pytest.mark.parametrize("value", ["x", "[1]", "nan", "1e400", "0", "-1", "true"])
def test_what_is_no_number_of_epochs_is_a_problem_of_its_key(capsys, value: str) -> None:
    assert main(["plan", "+recipe=quickstart", f"train.epochs={value}"]) == 2
    assert "train.epochs" in capsys.readouterr().err
