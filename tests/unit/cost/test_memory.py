"""Bytes of state, activation bytes by hand, and peaks over an order of actions."""

import pytest

from ppctl.config.schema import ModelConfig, TrainConfig
from ppctl.cost.activations import stage_activations
from ppctl.cost.setting import Setting
from ppctl.cost.state import PRECISIONS, peaks
from ppctl.geometry.layers import parse_layers
from ppctl.geometry.parameters import Sizes
from ppctl.schedule.action import Action
from ppctl.topology import ParallelSizes


@pytest.mark.parametrize(
    ("dtype", "bytes_per_parameter"), [("float32", 4 + 4 + 8), ("bfloat16", 2 + 4 + 12), ("float64", 8 + 8 + 16)]
)
def test_state_per_parameter(dtype: str, bytes_per_parameter: int) -> None:
    precision = PRECISIONS[dtype]
    assert precision.weight + precision.gradient + precision.optimizer == bytes_per_parameter


MODEL = ModelConfig(
    num_layers=2, hidden_size=8, ffn_hidden_size=16, num_attention_heads=2, num_query_groups=1, vocab_size=32
)


@pytest.mark.parametrize(
    ("layers", "elements", "other"),
    [
        (("embedding",), 0, 8),
        # two norms' inputs and outputs, q and result (8 each), k and v (4 each), three vectors of the feed-forward
        (("decoder.0",), 4 * 8 + 2 * 8 + 2 * 4 + 3 * 16, 4 * (2 + 2)),
        # a norm's input and output, the logits; labels
        (("loss",), 2 * 8 + 32, 8),
        ((), 8, 0),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activation_bytes_by_hand(layers: tuple[str, ...], elements: int, other: int, dtype: str) -> None:
    precision = PRECISIONS[dtype]
    found = stage_activations(MODEL, parse_layers(layers), Setting(3, 10, precision.activation))
    assert found.kept == 30 * (elements * precision.activation + other)


KEPT = stage_activations(MODEL, parse_layers(["decoder.0"]), Setting(1, 10, 4)).kept
INPUT = 10 * 4 * 8


@pytest.mark.parametrize(
    ("recompute", "kept"),
    [
        ({}, 2 * KEPT),
        ({"granularity": "full"}, 2 * INPUT),
        ({"granularity": "full", "num_layers": 2}, INPUT),
        ({"granularity": "full", "method": "block", "num_layers": 1}, INPUT + KEPT),
        ({"granularity": "full", "stages": [1]}, 2 * KEPT),
        ({"granularity": "selective", "modules": ["mlp"]}, 2 * (KEPT - 10 * 4 * 3 * 16)),
        ({"granularity": "selective", "modules": ["layernorm", "mlp"]}, 2 * (KEPT - 10 * 4 * (3 * 16 + 2 * 8 + 2))),
    ],
)
def test_recomputation_keeps_less_and_needs_it_again_in_the_backward(recompute: dict, kept: int) -> None:
    train = TrainConfig(**{f"recompute_{name}": value for name, value in recompute.items()})
    layers = ["decoder.0", "decoder.1"]
    plain = stage_activations(MODEL, parse_layers(layers), Setting(1, 10, 4))
    found = stage_activations(MODEL, parse_layers(layers), Setting(1, 10, 4, train=train))
    assert found.kept == kept
    # A block of one is the first layer, made again when what the second kept is free.
    again = kept < plain.kept and recompute.get("method") != "block"
    assert (found.in_backward > plain.in_backward) == again


def test_context_parallelism_divides_the_tokens() -> None:
    layers = parse_layers(["decoder.0"])
    whole = stage_activations(MODEL, layers, Setting(1, 10, 4))
    half = stage_activations(MODEL, layers, Setting(1, 10, 4, ParallelSizes(2, cp=2, edp=2)))
    tables = 2 * 4 * 5 * Sizes.of(MODEL).head  # cosines and sines of its 5 positions, which no other rank has
    assert half.kept == whole.kept // 2 + tables


@pytest.mark.parametrize(
    ("actions", "sizes", "most"),
    [
        ("0F0 0B0 0F1 0B1", [3], (1, 3)),
        ("0F0 0F1 0B0 0F2 0B1 0B2", [3], (2, 6)),
        ("0F0 2F0 2B0 0B0", [5, 0, 7], (2, 12)),
        ("0F0 0F1 0B0 0B1 2F0 2B0", [5, 0, 70], (2, 70)),
        ("0F0 0I0 0F1 0W0 0I1 0W1", [3], (2, 6)),
        ("", [1], (0, 0)),
    ],
)
def test_a_peak_counts_what_is_alive_from_forward_to_backward(
    actions: str, sizes: list[int], most: tuple[int, int]
) -> None:
    assert peaks(list(map(Action.parse, actions.split())), sizes) == most
