"""`+scale=axes`: miniatures of every axis, as a person starts them, end well."""

from __future__ import annotations

import pytest
from command import metrics, only_run, ppctl

from ppctl.config.resources import recipes


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("recipe", "typed", "world"),
    [
        pytest.param("llama3_405b", [], 4),
        pytest.param("llama3_8b", ["tp=2", "cp=2", "model.cp_comm_type=a2a"], 8, marks=pytest.mark.whole),
        pytest.param("mixtral_8x7b", ["tp=2", "etp=2", "parallel.sequence_parallel=true"], 8, marks=pytest.mark.whole),
        pytest.param("deepseek_v3", ["tp=2", "cp=2", "etp=2"], 8, marks=pytest.mark.whole),
    ],
)
def test_a_miniature_of_all_axes_trains(tmp_path, recipe, typed, world):
    done = ppctl("train", f"+recipe={recipe}", "+scale=axes", "launch.device=cpu", *typed, cwd=tmp_path, timeout=360)
    assert done.returncode == 0, done.stderr
    run = only_run(tmp_path)
    losses = [record["loss"] for record in metrics(run)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 0.5
    assert len(list((run / "logs").iterdir())) == world


@pytest.mark.soak
@pytest.mark.timeout(480)
@pytest.mark.parametrize("recipe", sorted(recipes()))
def test_every_recipes_miniature_of_all_axes_trains(tmp_path, recipe):
    typed = "train", f"+recipe={recipe}", "+scale=axes", "launch.device=cpu", "steps=2"
    done = ppctl(*typed, cwd=tmp_path, timeout=450)
    assert done.returncode == 0, done.stderr
    assert [record["step"] for record in metrics(only_run(tmp_path))] == [1, 2]
