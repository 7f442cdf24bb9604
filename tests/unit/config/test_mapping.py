"""A RunConfig as plain data and back."""

import dataclasses
from functools import reduce
from operator import getitem

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ppctl.config.compose import compose
from ppctl.config.keys import keys, sections, text_keys, type_text
from ppctl.config.mapping import from_mapping, to_mapping
from ppctl.config.resources import recipes
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError


@pytest.mark.parametrize("name", sorted(recipes()))
def test_config_yaml_comes_back_equal(name):
    config = compose([f"recipe={name}", "launch.env.A=1", "layout=[[E,t],[t,L]]"]).config
    assert from_mapping(yaml.safe_load(yaml.safe_dump(to_mapping(config)))) == config


def _strategy(key):
    if key.name == "published":
        text = st.text(max_size=5)
        return st.lists(
            st.fixed_dictionaries({name: text for name in ("what", "published", "here", "why")}), max_size=2
        )
    if key.is_dtype:
        return st.sampled_from([None, "float32", "bfloat16", "float16", "float64"])
    kinds = {
        "int": st.integers(),
        "number": st.floats(allow_nan=False),
        "true or false": st.booleans(),
        "text": st.text(),
        "null": st.none(),
        "up": st.sampled_from(["up", "down"]),
        "down": st.sampled_from(["up", "down"]),
        "list of int": st.lists(st.integers()),
        "list of list of text": st.lists(st.lists(st.text())),
        "mapping of text to text": st.dictionaries(st.text(min_size=1), st.text()),
        "any value": st.one_of(st.none(), st.text(), st.integers(), st.lists(st.lists(st.text()))),
    }
    return st.one_of([kinds[word] for word in type_text(key.type).split(" or ") if word in kinds] or [st.booleans()])


@given(st.data())
def test_any_value_of_any_key_comes_back(data):
    key = data.draw(st.sampled_from(list(text_keys().values())))
    config = RunConfig()
    config[key.name] = data.draw(_strategy(key))
    assert from_mapping(to_mapping(config)) == config


def test_a_dtype_object_is_written_by_name():
    class Dtype:  # prints as torch's do
        def __str__(self):
            return "torch.bfloat16"

    config = RunConfig()
    config.parallel.params_dtype = Dtype()
    assert to_mapping(config)["parallel"]["params_dtype"] == "bfloat16"


def test_what_is_left_out_keeps_its_default():
    assert from_mapping({}) == RunConfig()
    assert from_mapping({"train": None, "model": {"num_layers": 2}}).model.num_layers == 2


def test_every_problem_is_told():
    with pytest.raises(ConfigError) as error:
        from_mapping({"train": {"steps": "x", "stepz": 1}, "foo": 1, "model": 3, "parallel": {"timers": 1}})
    assert [problem.code for problem in error.value.problems] == ["PP-E102", "PP-E102", "PP-E101", "PP-E101", "PP-E113"]


def test_the_mapping_holds_plain_data_for_every_key_that_text_can_set():
    mapping = to_mapping(RunConfig())
    names = {name for name in mapping if name not in sections()}
    trees = {section: reduce(getitem, section.split("."), mapping) for section in sections()}
    names |= {f"{section}.{key}" for section, tree in trees.items() for key in tree} - sections().keys()
    assert names == set(text_keys())
    assert {name for name in keys() if name not in names} == {
        f"parallel.{name}"
        for name in (
            "timers", "finalize_model_grads_func", "grad_scale_func", "no_sync_func", "grad_sync_func",
            "param_sync_func", "_cpu_offloading_context",
        )
    } | {"pipeline.loss_fn"}  # fmt: skip


def test_every_section_of_the_schema_is_a_section():
    top = [f.name for f in dataclasses.fields(RunConfig) if f.name not in ("recipe", "scale", "published")]
    assert [name for name in sections() if "." not in name] == top
    assert sections().keys() - set(top) == {"launch.kubernetes"}
