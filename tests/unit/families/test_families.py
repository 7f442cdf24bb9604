"""Sizes and names of every family: written and read back alike, and counted as the closed forms count."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ppctl.config.schema import ModelConfig
from ppctl.cost import parameters as count
from ppctl.errors import ConfigError
from ppctl.families.config_json import canonical, known_families, read_config, write_config
from ppctl.families.directory import mtp_tables, stored_names
from ppctl.families.tensors import model_tensors

CONF = Path(__file__).parents[3] / "conf" / "model"
FAMILY = {
    "deepseek_v2_lite": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "glm4_5": "glm4_moe",
    "kimi_k2": "deepseek_v3",
    "llama2_70b": "llama",
    "llama2_7b": "llama",
    "llama3_405b": "llama",
    "llama3_70b": "llama",
    "llama3_8b": "llama",
    "mixtral_8x22b": "mixtral",
    "mixtral_8x7b": "mixtral",
    "qwen3_235b_a22b": "qwen3_moe",
    "qwen3_30b_a3b": "qwen3_moe",
    "qwen3_32b": "qwen3",
    "qwen3_8b": "qwen3",
    "tiny": "llama",
}


def shipped(name):
    return ModelConfig(**yaml.safe_load((CONF / f"{name}.yaml").read_text()))


def test_every_model_that_can_be_trained_has_a_family():
    assert {path.stem for path in CONF.glob("*.yaml")} - set(FAMILY) == {"gpt3_175b"}


@pytest.mark.parametrize("name", FAMILY)
def test_a_model_is_written_for_its_family_and_read_back_as_it_was(name):
    family, written = write_config(shipped(name))
    assert family.model_type == FAMILY[name]
    read = read_config(written, "config.json").model
    lost = dict(
        moe_router_bias_update_rate=1e-3, mtp_loss_scaling_factor=0.1, moe_router_load_balancing_type="aux_loss"
    )
    assert read == replace(canonical(shipped(name)), **lost)


@pytest.mark.parametrize("name", FAMILY)
def test_the_tensors_of_a_model_add_up_to_its_parameters(name):
    model = shipped(name)
    built = sum(math.prod(shape) for shape in model_tensors(model).values())
    assert built == count.total_parameters(model) + count.mtp_parameters(model)


@pytest.mark.parametrize("name", FAMILY)
def test_what_would_be_stored_is_what_hugging_face_stores(name):
    model = shipped(name)
    family, _ = write_config(model)
    names = [*stored_names(family, model).values(), *mtp_tables(model)]
    assert len(set(names)) == len(names)
    shapes = model_tensors(model)
    stored = sum(math.prod(shapes[of]) for of in (*shapes, *mtp_tables(model).values()))
    assert stored == count.hugging_face_parameters(model)


def test_stored_names_are_the_published_ones():
    model = shipped("deepseek_v3")
    family, _ = write_config(model)
    names = {*stored_names(family, model).values(), *mtp_tables(model)}
    assert names >= {
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.60.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.60.mlp.experts.255.down_proj.weight",
        "model.layers.60.mlp.gate.e_score_correction_bias",
        "model.layers.61.eh_proj.weight",
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.mlp.shared_experts.up_proj.weight",
        "model.layers.61.shared_head.head.weight",
        "model.layers.61.shared_head.norm.weight",
    }


def test_a_model_that_no_family_expresses_is_refused_with_what_would_be_lost():
    with pytest.raises(ConfigError) as caught:
        write_config(shipped("gpt3_175b"))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E522"
    assert "model.normalization=LayerNorm" in problem.message and "llama" in problem.message


LLAMA = write_config(shipped("tiny"))[1]


def test_an_unknown_family_is_refused_naming_the_known_ones():
    with pytest.raises(ConfigError) as caught:
        read_config({**LLAMA, "model_type": "gpt_neox"}, "config.json")
    (problem,) = caught.value.problems
    assert problem.code == "PP-E520"
    assert all(name in problem.message for name in known_families())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 8.0}}, "positions of type longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "high_freq_factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "attention_factor": 2.0}}, "attention_factor=2.0"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "mscale": 1.0}}, "only one of mscale"),
        ({"hidden_size": None}, "hidden_size is missing"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key(changes, says):
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        read_config(config, "config.json")
    (problem,) = caught.value.problems
    assert problem.code == "PP-E521" and says in problem.message


def test_new_and_old_spellings_of_positions_mean_the_same():
    old = {**LLAMA, "rope_theta": 7.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0}}
    del new["rope_theta"], new["rope_scaling"]
    assert read_config(old, "").model == read_config(new, "").model
