"""What data.path may say, and what has to be said for an evaluation."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppctl.config.compose import compose
from ppctl.config.data_paths import LONGEST_CYCLE, DataSource, quotas, read_sources
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.errors import ConfigError

THIRDS = (DataSource("a", Fraction(3, 10)), DataSource("b", Fraction(7, 10)))


@pytest.mark.parametrize(
    ("value", "sources"),
    [
        (None, ()),
        ("texts/**/*.txt", (DataSource("texts/**/*.txt"),)),
        ("[ab]*.txt", (DataSource("[ab]*.txt"),)),
        ("[0.3,a,0.7,b]", THIRDS),
        ("[ 0.3 , 'a' , 0.7, b ]", THIRDS),
        ([0.3, "a", 0.7, "b"], THIRDS),
        (["0.3", "a", "0.7", "b"], THIRDS),
        ("[30,a,70,b]", (DataSource("a", Fraction(30)), DataSource("b", Fraction(70)))),
        ("[a,b]", (DataSource("a"), DataSource("b"))),
    ],
    ids=str,
)
def test_every_form_names_paths_and_weights(value, sources):
    assert read_sources(value) == sources


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("[]", "one of them is empty"),
        ("[0.3,a,0.7,]", "one of them is empty"),
        ("[0.3,a,0.7]", "0.7 is in the place of a path"),
        ("[0.3,a,b]", "b has no partner"),
        ("[0.3,a,b,c]", "a weight is a number greater than 0, not b"),
        ("[0,a,1,b]", "a weight is a number greater than 0, not 0"),
        ("[-1,a,1,b]", "greater than 0, not -1"),
        ("[nan,a,1,b]", "nan is in the place of a path"),
        ([float("inf"), "a", 1, "b"], "inf is in the place of a path"),
        ([True, "a"], "True is in the place of a path"),
        (["a", 3], "3 is in the place of a path"),
        ([{"path": "a", "weight": 1}, {"path": "b", "weight": 2}], r"such as \[0.3,a,0.7,b\], not mappings"),
        ("[{path: a, weight: 0.3}, {path: b, weight: 0.7}]", r"such as \[0.3,a,0.7,b\], not mappings"),
        ([0.3, "a", 0.7, {"path": "b"}], "{'path': 'b'} is in the place of a path"),
        ("[1,a,1e-9,b]", "less than one sample in 65536: leave that path out"),
    ],
    ids=str,
)
def test_what_is_no_blend_is_told(value, said):
    with pytest.raises(ValueError, match=said):
        read_sources(value)


@given(st.lists(st.fractions(min_value=Fraction(1, 50), max_value=50), min_size=1, max_size=6))
def test_a_cycle_holds_each_source_in_its_proportion(weights):
    found = quotas(weights)
    length = sum(found)
    assert length <= LONGEST_CYCLE
    for weight, quota in zip(weights, found, strict=True):
        exact = weight / sum(weights) * length
        assert abs(quota - exact) < 1
        assert quota == exact or length == LONGEST_CYCLE


def test_tenths_are_tenths():
    assert quotas([source.weight for source in THIRDS]) == (3, 7)


RULES = [
    (["train.eval_interval=5", "train.eval_steps=2"], "neither is set", "data.validation_split=0.05"),
    (["train.eval_interval=5", "data.validation_split=0.1"], "at least one batch", "train.eval_steps=8"),
    (["train.eval_steps=2"], "there is no evaluation", "train.eval_steps=0"),
    (["data.validation_path=x"], "there is no evaluation", "data.validation_path=null"),
    (["data.validation_split=1"], "0 or more, below 1", "data.validation_split=0.0"),
    (["data.validation_split=nan"], "0 or more, below 1", "data.validation_split=0.0"),
    (["data.path=[0,a]"], "greater than 0", "data.path=null"),
    (["data.path=[a,1]"], "1 is in the place of a path", "data.path=null"),
]


@pytest.mark.parametrize(("typed", "said", "remedy"), RULES, ids=lambda value: " ".join(value))
def test_a_rule_is_told_with_a_remedy(typed, said, remedy):
    with pytest.raises(ConfigError) as caught:
        compose(typed)
    assert [(p.remedy, said in p.message) for p in caught.value.problems if p.remedy == remedy] == [(remedy, True)]


def test_a_blend_comes_through_the_command_line_and_the_run_directory_as_it_is():
    for value in ("[0.3,data/*.txt,0.7,/x/b=1]", [0.25, "a,b/*.txt", 0.75, "c"]):
        config = compose([f"data.path={value}"] if isinstance(value, str) else []).config
        config.data.path = value
        assert from_mapping(to_mapping(config)).data.path == value
