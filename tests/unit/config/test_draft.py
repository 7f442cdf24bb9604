"""A draft takes values of unknown types: of a directory that is asked with them, and of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppctl.config.compose import compose
from ppctl.config.draft import Draft, model
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem
from ppctl.launch.planning import planned


@pytest.mark.parametrize(
    ("given", "seen"), [({"a": None}, {"a": "null"}), (3, {}), (["a"], {}), ({"a": "1"}, {"a": "1"})]
)
def test_a_directory_is_asked_with_values_of_the_keys_types(given: Any, seen: dict[str, str]) -> None:
    draft = Draft.of(RunConfig(), {}, [])
    draft.values |= {"model.from": "DIR", "model.implementation": "transformers", "model.hf_overrides": given}
    asked = []

    def read_model(*words: Any) -> Any:
        asked.append(words)
        raise ConfigError(Problem("PP-E520", "no such directory"))

    model(draft, read_model, scaled=False, for_training=False)
    assert asked == [("DIR", "transformers", seen, {})]


def test_a_directory_is_asked_by_the_name_that_its_interpolation_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELS", "/models")
    asked = []

    def read_model(directory: str, *words: Any) -> Any:
        asked.append(directory)
        return {}

    compose(["model.from='${oc.env:MODELS}/small'"], read_model=read_model)
    assert asked == ["/models/small"]
    with pytest.raises(ConfigError, match="PP-E114"):
        compose(["model.from='${oc.env:NOT_SET}/small'"], read_model=read_model)
    assert len(asked) == 1


def test_a_miniature_is_made_from_interpolated_sizes() -> None:
    sizes = ["model.num_layers=6", "pp=3", "vpp=2", "data.seq_length=128"]
    plain = compose(["+recipe=quickstart", "+scale=smoke", *sizes]).config
    sizes[1] = "pp=${checkpoint.keep}"
    assert compose(["+recipe=quickstart", "+scale=smoke", *sizes, "checkpoint.keep=3"]).config.train == plain.train


def test_a_home_directory_is_meant_by_its_sign_also_behind_a_keys_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    config = compose(["log.dir=~/runs", "checkpoint.resume=~/runs/a/b"]).config
    assert (config.log.dir, config.checkpoint.resume) == ("/home/me/runs", "/home/me/runs/a/b")
    config = compose(["log.dir=~nobody-here/runs", "checkpoint.resume=auto"]).config
    assert (config.log.dir, config.checkpoint.resume) == ("~nobody-here/runs", "auto")


@pytest.mark.parametrize(
    ("typed", "code", "remedy"),
    [
        ("parallel.bf16=yes", "PP-E102", "parallel.bf16=true"),
        ("parallel.tp_comm_bulk_wgrad=0", "PP-E102", "parallel.tp_comm_bulk_wgrad=true"),
        ("parallel.bf16=off", "PP-E102", "parallel.bf16=false"),
        ("parallel.bf16=2", "PP-E102", "parallel.bf16=false"),
        ("parallel.bf16=null", "PP-E102", "parallel.bf16=false"),
        ("recipe=", "PP-E104", "ppctl recipes"),
    ],
)
def test_the_remedy_of_a_word_is_what_was_meant_and_nothing_is_planned_without_it(
    typed: str, code: str, remedy: str
) -> None:
    _, plan, (problem,) = planned([typed])
    assert (plan, problem.code, problem.remedy) == (None, code, remedy)
    assert "None" not in problem.message


def test_a_section_that_a_file_sets_to_one_value_is_a_problem_among_the_others(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("train:\n  stepz: 3\nmodel: 5\ndata: 7\n")
    with pytest.raises(ConfigError) as error:
        compose([f"recipe={recipe}", "steps=4"])
    problems = error.value.problems
    assert [problem.code for problem in problems] == ["PP-E102", "PP-E102", "PP-E101"]
    assert [problem.message.split()[0] for problem in problems[:2]] == ["model", "data"]
