"""Which layers have experts: Megatron's `moe_layer_freq`, read without executing anything."""

import pytest

from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.schema import ModelConfig
from ppctl.errors import ConfigError


@pytest.mark.parametrize(
    ("freq", "pattern"),
    [
        (1, "1111"),
        (2, "1010"),
        (3, "1001"),
        ([0, 1, 1, 0], "0110"),
        ("[0]*1+[1]*3", "0111"),
        (" 2 * [0, 1] ", "0101"),
        ("([0]+[1])*2", "0101"),
        ("2", "1010"),
    ],
)
def test_the_frequency_says_which_layers_are_moe(freq, pattern: str) -> None:
    model = ModelConfig(num_layers=4, num_moe_experts=8, moe_layer_freq=freq)
    assert "".join(str(int(moe)) for moe in moe_layer_pattern(model)) == pattern


def test_without_experts_no_layer_is_moe() -> None:
    assert moe_layer_pattern(ModelConfig(num_layers=3, moe_layer_freq="[1]*3")) == (False,) * 3


@pytest.mark.parametrize(
    "freq",
    [
        0,
        -1,
        True,
        None,
        "",
        "[1]*3",
        [1, 1, 1, 2],
        [[1], 1, 1, 1],
        "__import__('os').system('true')",
        "[1]*(10**9)",
        "[1]*99999999999",
        "[" * 500,
        "[1]-[0]",
        "'a'*4",
        "[1]+1",
        "[1]*[1]",
        "(lambda: [1]*4)()",
    ],
)
def test_anything_else_is_refused_by_name(freq) -> None:
    with pytest.raises(ConfigError) as caught:
        moe_layer_pattern(ModelConfig(num_layers=4, num_moe_experts=8, moe_layer_freq=freq))
    (problem,) = caught.value.problems
    assert problem.code == "PP-E210"
    assert "moe_layer_freq" in problem.message
