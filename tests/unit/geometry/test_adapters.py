"""What `model.lora` may say, and what becomes of a layer's rows."""

import shlex

import pytest

from ppctl.geometry.adapters import WrongAdapters, read_adapters, trained_whole, with_adapters
from ppctl.geometry.foreign_model import Adapters
from ppctl.geometry.rows import Parameter

GIVEN = {"rank": "4", "targets": "[q_proj,self_attn.v_proj]"}


@pytest.mark.parametrize(
    ("typed", "layers"), [("[3]", (3,)), ("3", (3,)), ("[0,4-6]", (0, 4, 5, 6)), ([2, 1], (1, 2)), ("[1-1,1]", (1,))]
)
def test_layers_are_indexes_and_ranges(typed, layers):
    assert read_adapters(GIVEN | {"layers": typed}) == Adapters(4, 4.0, ("q_proj", "self_attn.v_proj"), layers)


@pytest.mark.parametrize("typed", ["[]", "[4-3]", "[-1]", "all", "[1,,2]", "[0-99999999]", "1.5"])
def test_layers_that_are_none_are_refused(typed):
    with pytest.raises(ValueError, match="decoder layers are named from 0 on"):
        read_adapters(GIVEN | {"layers": typed})


def test_empty_lists_are_told_as_empty():
    with pytest.raises(ValueError, match=r"none is named$"):
        read_adapters(GIVEN | {"layers": "[]"})
    with pytest.raises(ValueError, match=r"targets=\[\] names no module$"):
        read_adapters(GIVEN | {"targets": "[]"})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lora_dropout", "its name here is dropout"),
        ("layers_to_transform", "its name here is layers"),
        ("use_dora", "adapters have no magnitudes here"),
        ("anything", "nothing called anything"),
    ],
)
def test_other_settings_of_pefts_are_answered_by_what_is_so_here(name, said):
    with pytest.raises(ValueError, match=said):
        read_adapters(GIVEN | {name: "x"})


WRONG = [
    {"anything": "x"},
    {"modules_to_save": "[lm_head,]", "use_dora": "true"},
    {"lora_dropout": 0.05},
    {"r": "7", "rank": "null"},
    {"rank": None, "r": "8", "target_modules": "[k_proj]", "targets": "null", "lora_alpha": 3.0},
    {"layers_to_transform": [0, 2]},
    {"dropout": "1"},
    {"dropout": "much"},
    {"bias": "all"},
    {"rank": "0"},
    {"rank": "1.5"},
    {"rank": ""},
    {"alpha": "-1"},
    {"targets": "[]"},
    {"targets": "[q_proj,]"},
    {"layers": "[4-3]"},
]


@pytest.mark.parametrize("said", WRONG)
def test_remedies_that_are_typed_in_the_place_of_what_is_wrong_lead_to_adapters(said):
    given = GIVEN | said
    for _ in range(4):
        try:
            found = read_adapters(given)
        except WrongAdapters as wrong:
            assert wrong.remedy
            given |= {
                word.partition("=")[0].removeprefix("model.lora."): word.partition("=")[2]
                for word in shlex.split(wrong.remedy)
            }
        else:
            break
    assert found.rank == int(said.get("r", found.rank)) and found.targets
    assert said.get("layers_to_transform") in (None, list(found.layers))


def test_a_layers_weights_are_frozen_and_adapters_stand_behind_theirs():
    rows = [Parameter("h.{layer}.c_attn.weight", (8, 24), "matrix"), Parameter("h.{layer}.c_attn.bias", (24,), "bias")]
    made = {"h.{layer}.c_attn.lora_A.weight": (2, 8), "h.{layer}.c_attn.lora_B.weight": (24, 2)}
    *_, whole = with_adapters(rows, made, ["h.{layer}.c_attn.bias"])
    weight, first, second, bias = with_adapters(rows, made)
    assert whole.gradient == "complete"
    assert (weight.gradient, bias.gradient, first.gradient) == ("none", "none", "complete")
    assert (first.shape, first.start, second.shape, second.start) == ((2, 8), "adapter", (24, 2), "zeros")


def test_modules_are_trained_whole_by_the_end_of_their_path_as_peft_matches_it():
    adapters = read_adapters(GIVEN | {"modules_to_save": "[norm,lm_head]", "dropout": "0.05"})
    assert (adapters.dropout, adapters.modules_to_save) == (0.05, ("norm", "lm_head"))
    names = ["model.norm.weight", "model.layers.1.input_layernorm.weight", "lm_head.weight"]
    assert all(trained_whole(name, adapters) for name in names)
    assert not trained_whole("model.layers.1.mlp.norms.weight", adapters) and not trained_whole("norm", adapters)
