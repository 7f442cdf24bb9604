"""What a config.json leaves out means what transformers' config class means by it, for every family and every key."""

import copy
import random

import pytest
import transformers

from ppctl.errors import ConfigError
from ppctl.families.config_json import read_config
from ppctl.families.family_table import FAMILIES

YARN = {"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
OTHERS = dict(
    vocab_size=320, hidden_size=1024, intermediate_size=512, num_hidden_layers=6, num_attention_heads=16,
    num_key_value_heads=2, head_dim=96, max_position_embeddings=999, rms_norm_eps=1e-3, initializer_range=0.5,
    tie_word_embeddings=True, rope_theta=777.0, rope_scaling=YARN, partial_rotary_factor=0.25, q_lora_rank=99,
    kv_lora_rank=88, qk_nope_head_dim=24, qk_rope_head_dim=16, v_head_dim=20, num_local_experts=12, num_experts=12,
    n_routed_experts=12, n_shared_experts=3, num_experts_per_tok=3, moe_intermediate_size=48, first_k_dense_replace=2,
    n_group=2, topk_group=2, routed_scaling_factor=1.25, router_aux_loss_coef=0.5, aux_loss_alpha=0.5,
    decoder_sparse_step=2, mlp_only_layers=[1], norm_topk_prob=True, num_nextn_predict_layers=2, attention_bias=True,
    use_qk_norm=True,
)  # fmt: skip
"""A value of every key that the table has a default for, which is no family's default."""
MTP = {"num_nextn_predict_layers": None}
"""Not the classes' default: version 5.23 presumes a module and names it num_mtp_layers, older ones know no such key,
and files of both hold no module unless they name the key."""
NEEDED = {"deepseek_v2": {"num_experts_per_tok": 2}}
"""Has no default in the class (none, with which no expert is chosen), and is refused by ppctl where it is missing."""


def model(family, keys):
    return read_config({"model_type": family.model_type, **NEEDED.get(family.model_type, {}), **keys}, "")[1]


def completed(family, keys):
    """All keys as transformers has them once its class has read `keys`; without a class's names for the same."""
    config = getattr(transformers, family.architecture.replace("ForCausalLM", "Config"))
    told = config(**copy.deepcopy({**NEEDED.get(family.model_type, {}), **keys})).to_dict()
    return told if set(MTP) & set(keys) else {**told, **MTP}


def in_both(family):
    """Keys that the class takes at another value than its default; the others are refused, or change nothing."""
    return [key for key in OTHERS if key in family.defaults or key == "rope_scaling"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_what_is_left_out_is_what_the_config_class_makes_of_it(family):
    """Nothing, each key alone, and 200 random selections of keys."""
    chance, keys = random.Random(7), in_both(family)
    selections = [
        (),
        *((key,) for key in keys),
        *(chance.sample(keys, chance.randint(2, len(keys))) for _ in range(200)),
    ]
    for selection in selections:
        told = {key: OTHERS[key] for key in selection}
        assert model(family, told) == model(family, completed(family, told)), told


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_default_of_the_table_is_tried_and_changes_the_model(family):
    assert family.defaults.keys() <= OTHERS.keys()
    for key in in_both(family):
        if (key, family.model_type) not in WITHOUT_EFFECT:
            assert model(family, {key: OTHERS[key]}) != model(family, {}), key


WITHOUT_EFFECT = {
    ("norm_topk_prob", "deepseek_v3"),  # what is built, and the default
    ("norm_topk_prob", "glm4_moe"),
    ("topk_group", "glm4_moe"),  # of one group
    ("num_key_value_heads", "deepseek_v2"),  # of latent attention, as head_dim
    ("num_key_value_heads", "deepseek_v3"),
    ("head_dim", "deepseek_v2"),
    ("head_dim", "deepseek_v3"),
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_the_class_s_value_of_every_fixed_key_is_one_that_is_built(family):
    told = completed(family, {})
    assert {key: told[key] for key, allowed in family.fixed.items() if key in told and told[key] not in allowed} == {}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_both_names_of_a_key_are_read(family):
    config = getattr(transformers, family.architecture.replace("ForCausalLM", "Config"))
    pairs = {frozenset(pair) for pair in config.attribute_map.items()}
    assert {frozenset(pair) for pair in family.synonyms.items()} == pairs
    for other, name in family.synonyms.items():
        assert model(family, {other: OTHERS[name]}) == model(family, {name: OTHERS[name]})


def test_what_a_class_has_no_default_for_is_refused_where_it_is_missing():
    for kind, needed in NEEDED.items():
        for key in needed:
            with pytest.raises(ConfigError, match=f"{key} is missing"):
                read_config({"model_type": kind}, "")
