"""Sizes and names of every family: written and read back alike, and counted as the closed forms count."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ppctl.config.schema import ModelConfig
from ppctl.cost import parameter_counts as count
from ppctl.errors import ConfigError
from ppctl.families.config_json import canonical, known_families, read_config, write_config
from ppctl.families.directory import model_tensors, mtp_tables, stored_names
from ppctl.families.family_table import FAMILIES

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
    read = read_config(written, "config.json")[1]
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
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


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
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 64}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": "8"}}, 'factor: takes a number, not "8"'),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": None}}, "factor: takes a number, not null"),
        ({"rope_scaling": {"type": "yarn", "factor": 8.0, "truncate": False}}, "truncate=False"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "one mapping for all layers"),
        ({"hidden_size": "wide"}, "hidden_size: takes int, not 'wide'"),
    ],
)
def test_what_is_not_built_is_refused_by_its_key_with_a_command_that_shows_it(tmp_path, changes, says):
    config = {key: value for key, value in {**LLAMA, **changes}.items() if value is not None}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config, indent=1))
    with pytest.raises(ConfigError) as caught:
        read_config(config, str(file))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E521" and says in problem.message
    shown = subprocess.run(problem.remedy, shell=True, capture_output=True, check=True, text=True).stdout
    assert next(iter(changes)) in shown


@pytest.mark.parametrize("config", [{}, {"model_type": "gpt2"}, {"model_type": ["llama"]}])
def test_a_family_that_is_not_built_is_refused_with_a_command_that_shows_it(tmp_path, config):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="PP-E520") as caught:
        read_config(config, str(file))
    subprocess.run(caught.value.problems[0].remedy, shell=True, capture_output=True, check=True)


def test_new_and_old_spellings_of_positions_mean_the_same():
    old = {**LLAMA, "rope_theta": 7.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new = {**LLAMA, "rope_parameters": {"rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0}}
    del new["rope_theta"], new["rope_scaling"]
    assert read_config(old, "")[1] == read_config(new, "")[1]


def read(family, **keys):
    """The model of a config.json that holds the given keys alone."""
    return read_config({"model_type": family, **keys}, "config.json")[1]


# --- long-context positions ------------------------------------------------------------------------------------------

ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("keys", "original", "factor"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, 512, 4.0),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 512, 4.0),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 64}}, 64, 4.0),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 64}, ORIGINAL: 128}, 128, 4.0),
        ({"rope_scaling": {"type": "yarn", "factor": None, ORIGINAL: 64}}, 64, 8.0),
        ({"rope_scaling": {"type": "yarn", "factor": None}}, 512, 1.0),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": 4.0}}, 64, 4.0),
        ({"rope_scaling": {"rope_type": "llama3", "low_freq_factor": 1, "high_freq_factor": 4, "factor": 4}}, 512, 4.0),
    ],
)  # fmt: skip
def test_the_original_length_and_the_factor_are_those_that_transformers_takes(keys, original, factor):
    model = read_config({**LLAMA, "max_position_embeddings": 512, **keys}, "config.json")[1]
    assert (model.original_max_position_embeddings, model.rotary_scaling_factor) == (original, factor)
    written = write_config(model)[1]["rope_scaling"]
    assert (written[ORIGINAL], written["factor"]) == (original, factor)


def test_of_two_spellings_of_positions_the_old_one_counts_as_in_transformers():
    new, old = {"rope_type": "default", "rope_theta": 7.0}, {"type": "yarn", "factor": 4.0, "rope_theta": 9.0}
    model = read_config({**LLAMA, "rope_parameters": new, "rope_scaling": old}, "config.json")[1]
    assert (model.rotary_base, model.rotary_scaling_factor) == (9.0, 4.0)


# --- one expert a token (decision 24) --------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
@pytest.mark.parametrize(
    ("topk", "divided", "says"),
    [
        (2, True, None),
        (1, False, None),
        (1, True, "transformers divides the one weight by itself"),
        (2, False, "norm_topk_prob: false is not built"),
    ],
)
def test_one_expert_a_token_is_read_where_all_readers_agree_on_its_weight(family, topk, divided, says):
    keys = {"num_experts_per_tok": topk, "norm_topk_prob": divided}
    if says is None:
        model = read(family, **keys)
        assert model.moe_router_topk == topk
        assert {key: write_config(model)[1][key] for key in keys} == keys
        return
    with pytest.raises(ConfigError, match=says) as caught:
        read(family, **keys)
    assert [problem.code for problem in caught.value.problems] == ["PP-E521"]
    assert read(family, **keys, first_k_dense_replace=100).num_moe_experts is None  # no router, no question


def test_a_deepseek_v2_that_divides_weights_is_refused_because_transformers_never_does():
    with pytest.raises(ConfigError, match="norm_topk_prob=True is not built for deepseek_v2"):
        read("deepseek_v2", num_experts_per_tok=2, norm_topk_prob=True)
    with pytest.raises(ConfigError, match=r"model\.moe_router_pre_softmax=False"):
        write_config(replace(shipped("deepseek_v2_lite"), moe_router_pre_softmax=False))


# --- what is missing, and what is no value ---------------------------------------------------------------------------


def test_a_file_that_says_nothing_means_the_first_model_of_its_family():
    """tests/torch/families/test_config_defaults.py holds every default against transformers' classes."""
    assert read("llama") == replace(canonical(shipped("llama2_7b")), norm_epsilon=1e-6, max_position_embeddings=2048)
    learning = dict(mtp_num_layers=None, mtp_loss_scaling_factor=0.1, init_method_std=0.02, moe_aux_loss_coeff=0.0)
    published = replace(shipped("deepseek_v3"), **learning, moe_router_load_balancing_type="aux_loss")
    assert read("deepseek_v3") == canonical(published)


def test_the_number_of_experts_per_token_of_deepseek_v2_has_no_default():
    with pytest.raises(ConfigError, match="num_experts_per_tok is missing"):
        read("deepseek_v2")


def test_an_export_says_that_there_is_no_multi_token_prediction_because_transformers_presumes_it():
    for name, stored in (("deepseek_v3", 1), ("glm4_5", 1)):
        assert write_config(shipped(name))[1]["num_nextn_predict_layers"] == stored
        assert write_config(replace(shipped(name), mtp_num_layers=None))[1]["num_nextn_predict_layers"] == 0


HOSTILE = (None, "x", "", -1, 0, 0.5, 2.5, 10**6, float("nan"), float("inf"), True, [], [1], {}, {"a": 1}, {"a": {}})


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_whatever_a_key_holds_is_read_or_refused_in_words(family):
    kind, enough = family.model_type, {"num_hidden_layers": 4, "num_experts_per_tok": 2}
    yarn = {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 4, "beta_slow": 1}
    scaled = [yarn | {ORIGINAL: 64}, LLAMA3 | {"rope_type": "llama3", "factor": 2.0}]
    plain = [*family.defaults, *family.fixed, *family.synonyms, ORIGINAL, "rope_scaling", "rope_parameters"]
    cases = [{"rope_scaling": scaled[0], key: value} for key in plain for value in HOSTILE]
    cases += [{"rope_scaling": {**each, key: value}} for each in scaled for key in each for value in HOSTILE]
    for case in cases:
        try:
            read(kind, **enough | case)
        except ConfigError as error:
            assert all(problem.code == "PP-E521" for problem in error.problems), case
            assert all(problem.remedy and problem.place for problem in error.problems), case
