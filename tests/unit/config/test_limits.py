"""What one value may be: every number has bounds, every bound is held and shown, and its remedy works."""

import shlex
from typing import Any

import pytest

from ppctl.cli.explain import explain
from ppctl.config.checks import check
from ppctl.config.compose import compose
from ppctl.config.keys import keys, keys_with, members, text_keys
from ppctl.config.metadata import Bounds, Form, OneOf
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError
from ppctl.plan import build_plan

LIMITED = list(keys_with("limit").values())
NUMBERS = [
    key.name for key in text_keys().values() if {int, float} & {*members(key.type)} and str not in members(key.type)
]
BOUNDED = [key.name for key in LIMITED if isinstance(key.limit, Bounds)]
CHOSEN = [key.name for key in LIMITED if isinstance(key.limit, OneOf)]
FORMED = [key.name for key in LIMITED if isinstance(key.limit, Form)]


def beyond(name: str) -> list[float | str]:
    """Values just beyond the limit of a key."""
    limit = keys()[name].limit
    if isinstance(limit, Bounds):
        most = limit.most if limit.below else limit.most + (1 if int in members(keys()[name].type) else limit.most)
        return [-1 if limit.zero else 0, most, *([] if int in members(keys()[name].type) else [float("nan")])]
    if {float, str} <= {*members(keys()[name].type)}:
        return ["", 0, -1, float("nan"), float("inf"), "0GiB"]
    if list[int] in members(keys()[name].type):
        return ["[2]", "[0,2]"]
    if list[Any] in members(keys()[name].type) and str not in members(keys()[name].type):
        return ["[]", "[{style: none of them, until: 3}]"]
    if list[str] in members(keys()[name].type) and str not in members(keys()[name].type):
        return ["[os.system]", "[package:one,two]"]
    return ["" if isinstance(limit, Form) else "none of them"]


def test_every_number_has_bounds() -> None:
    assert set(NUMBERS) == set(BOUNDED)


def test_defaults_are_within_their_limits() -> None:
    assert [key.name for key in LIMITED if not key.allows(key.default)] == []


@pytest.mark.parametrize("name", [*BOUNDED, *CHOSEN, *FORMED])
def test_a_value_beyond_is_told_with_its_rule_and_a_remedy_that_works(name: str) -> None:
    limit = keys()[name].limit
    assert limit is not None
    for value in beyond(name):
        with pytest.raises(ConfigError) as error:
            compose([f"{name}={value}"])
        (problem,) = [each for each in error.value.problems if each.place.startswith(f"{name} = ")]
        assert problem.code == "PP-E103"
        assert problem.message.startswith(f"{name} must be {limit.words}")
        compose(shlex.split(problem.remedy))


@pytest.mark.parametrize("name", BOUNDED)
def test_a_plan_made_in_python_is_held_to_the_same_bounds(name: str) -> None:
    for value in beyond(name):
        config = RunConfig()
        config[name] = value
        try:
            problems = build_plan(config).problems
        except ConfigError as error:
            problems = error.problems
        assert "PP-E103" in {problem.code for problem in problems if problem.place.startswith(f"{name} = ")}


@pytest.mark.parametrize("name", ["H100", "Gb200", "CPU", "h800"])
def test_a_device_is_named_in_capital_or_small_letters(name: str) -> None:
    config = compose([f"cost.device={name}"]).config
    assert check(config, {}) == []
    assert build_plan(config).timing.priced_by.lower() == name.lower()


def test_a_word_in_other_letters_is_recognised() -> None:
    with pytest.raises(ConfigError) as error:
        compose(["launch.device=CPU", "model.normalization=rmsnorm"])
    assert [problem.remedy for problem in error.value.problems] == ["model.normalization=RMSNorm", "launch.device=cpu"]


@pytest.mark.parametrize("key", LIMITED, ids=lambda key: key.name)
def test_explain_shows_the_limit_of_a_key_and_in_its_section(key) -> None:
    for topic in (key.name, key.name.rpartition(".")[0]):
        assert f"limit {key.limit.words}" in " ".join(explain(topic).split())
