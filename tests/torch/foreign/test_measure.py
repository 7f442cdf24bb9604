"""Measured without values: operations as torch counts them in a run, and peaks that hold for all lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from ppctl.config.schema import ModelConfig, RunConfig
from ppctl.cost.activations import stage_activations
from ppctl.cost.flops import stage_flops
from ppctl.cost.setting import TORCH_ON_CPU, Setting
from ppctl.foreign.anatomy import survey
from ppctl.foreign.describe import describe, names_of, traits_of
from ppctl.foreign.foreign_stage import ForeignStage
from ppctl.foreign.library import make_model, read_own_config
from ppctl.foreign.measure import BATCHES, fitted, measure, peak
from ppctl.foreign.measured_pass import COUNTED, valueless
from ppctl.geometry.foreign_model import ForeignModel, measured_for, most
from ppctl.geometry.layers import Layer, parse_layers
from ppctl.plan.build import build_plan

ROWS, LENGTH = 2, 96
SIZES = dict(
    vocab_size=192, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, max_position_embeddings=256,
    pad_token_id=None, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
GATED = dict(**SIZES, num_key_value_heads=2, intermediate_size=160)
WINDOWS = dict(layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=24, head_dim=16)
MODELS: dict[str, dict[str, Any]] = {
    "Llama": GATED,
    "Gemma2": GATED | WINDOWS,
    "GraniteMoe": GATED | dict(num_local_experts=4, num_experts_per_tok=2),
    "GPTNeoX": SIZES | dict(intermediate_size=256),
    "Qwen3Moe": GATED
    | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=16, mlp_only_layers=[1, 2]),
    "GptOss": GATED | WINDOWS | dict(num_local_experts=4, num_experts_per_tok=2),
    "Phi3": GATED,
}
SAMPLE = ("Qwen3Moe",)
BY_PAIR = ("bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")
"""Scores and weighted values: a causal model's are counted half."""


def described(kind: str, directory: Path) -> ForeignModel:
    getattr(transformers, f"{kind}Config")(**MODELS[kind]).save_pretrained(directory)
    return describe(directory, {})


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k in SAMPLE else pytest.mark.whole) for k in MODELS])
def test_operations_are_those_that_torch_counts_in_a_run(kind: str, tmp_path: Path) -> None:
    found = described(kind, tmp_path)
    model = ModelConfig(**found.sizes, transformers=found.to_text())
    for names in (["decoder.0", "decoder.1"], ["decoder.2", "decoder.3", "loss"]):
        layers = parse_layers(names)
        stage = ForeignStage(make_model(read_own_config(tmp_path), "meta").train(), found.anatomy, layers)
        with torch.no_grad():
            for tensor in (*stage.canonical_parameters().values(), *stage.canonical_buffers().values()):
                tensor.copy_(torch.randn_like(tensor) / 8)
            counter = FlopCounterMode(display=False, custom_mapping=COUNTED)
            with counter:
                stage(torch.randn(ROWS, LENGTH, SIZES["hidden_size"]))  # type: ignore[call-overload]
        counted = {str(op).split(".")[-1]: number for op, number in counter.get_flop_counts()["Global"].items()}
        expected = sum(number / (2 if name in BY_PAIR else 1) for name, number in counted.items())
        assert stage_flops(model, layers, ROWS, LENGTH) == pytest.approx(expected, rel=0.005), counted


LINEAR = GATED | dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=48, head_dim=16,
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
    layer_types=["linear_attention", "linear_attention", "full_attention", "linear_attention"],
)  # fmt: skip
KINDS: dict[str, tuple[tuple[int, ...], list[str]]] = {
    "Qwen3Moe": ((0, 1, 1, 0), ["mlp=Qwen3MoeSparseMoeBlock", "mlp=Qwen3MoeMLP"]),
    "Gemma2": ((0, 1, 0, 1), ["self_attn.layer_type=sliding_attention", "self_attn.layer_type=full_attention"]),
    "Qwen3Next": ((0, 0, 1, 0), ["block_type=linear_attention", "self_attn=Qwen3NextAttention"]),
    "Llama": ((0, 0, 0, 0), [""]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers_are_told_apart_and_named(kind: str) -> None:
    config = getattr(transformers, f"{kind}Config")(**(MODELS | {"Qwen3Next": LINEAR})[kind])
    traits = traits_of(make_model(config, "meta"), survey(make_model(config, "cpu")))
    different = list(dict.fromkeys(traits))
    order, names = KINDS[kind]
    assert tuple(map(different.index, traits)) == order
    assert [name.split(", ")[0] for name in names_of(different)] == names


@pytest.mark.whole
def test_a_window_counts_where_sequences_are_as_long() -> None:
    config = transformers.Cohere2Config(**GATED | WINDOWS)
    found = measure(config, survey(make_model(config, "cpu")), [0, 1], 64, 256)
    short, long = (measured_for(found, 4, length) for length in (23, 24))
    assert (short.above, long.above) == (0, 23)
    assert (len(short.tables), len(long.tables)) == (3, 4)  # a mask, which no shorter sequence needs
    assert long.layers[0].reads != long.layers[1].reads
    assert measured_for(found, 8, 25).layers[0].kept.of(2, 64) == 2 * long.layers[0].kept.of(2, 64)


MIXED: dict[str, tuple[dict[str, Any], str]] = {
    "Olmo3": ({}, "self_attn.attention_type=sliding_attention"),
    "Exaone4": ({}, "self_attn.is_sliding=True"),
    "Gemma3Text": ({}, "self_attn.layer_type=sliding_attention"),
    "GptOss": (dict(num_local_experts=4, num_experts_per_tok=2), "self_attn.layer_type=sliding_attention"),
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=() if k == "Olmo3" else pytest.mark.whole) for k in MIXED])
def test_a_plan_tells_layers_with_and_without_a_window_apart_and_prices_each(kind: str, tmp_path: Path) -> None:
    sizes, name = MIXED[kind]
    getattr(transformers, f"{kind}Config")(**GATED | WINDOWS | sizes).save_pretrained(tmp_path)
    found = describe(tmp_path, {})
    model = ModelConfig(**found.sizes, transformers=found.to_text())
    (said,) = (each for each in build_plan(RunConfig(model=model)).derived if each.key == "kinds of layers")
    assert found.layers == (0, 1, 0, 1) and not found.notes[1:]
    assert said.value == 2 and f"2 with {name}" in said.equation and "(layers 1, 3)" in said.equation

    def kept(length: int, layer: int) -> float:
        setting = Setting(1, length, 4, allocator=TORCH_ON_CPU)
        return stage_activations(model, [Layer("decoder", layer)], setting).kept

    def squares(length: int) -> float:
        """What a layer with a window keeps more than one without, without what grows with tokens."""
        more, half = (kept(each, 0) - kept(each, 1) for each in (length, length // 2))
        return more - 2 * half

    assert squares(22) == 0  # a token sees all before it
    if kind == "GptOss":  # whose own attention takes a mask in every layer
        long = measured_for(found.measured, 4, 96)
        tables = [set(layer.reads) for layer in long.layers]
        both, one = (
            sum(long.tables[number].of(1, 96) for number in numbers) for numbers in (tables[0] | tables[1], tables[0])
        )
        assert squares(96) == 0 and both - one == 4 * 96**2  # which each kind has of its own
    else:
        assert squares(96) == 4 * (96**2 - 2 * 48**2)  # each layer keeps a mask


def test_the_moment_that_has_most_depends_on_the_batch() -> None:
    batches = [(rows, (64, 128, 256)[place]) for rows, place in BATCHES]
    weights, tokens = 50_000.0, 40.0
    traces = [[weights, tokens * rows * length, 1.0] for rows, length in batches]
    found = peak(batches, traces)
    for rows, length in ((1, 64), (8, 4096), (3, 700)):
        assert most(found, rows, length) == pytest.approx(max(weights, tokens * rows * length))
    shared = fitted(batches, [7.0 * length**2 + 3.0 * rows * length for rows, length in batches])
    assert shared.of(5, 1000) == pytest.approx(7e6 + 15e3)


def test_whole_numbers_have_values_where_others_have_none() -> None:
    with valueless():
        scores = torch.zeros(6, 4)
        chosen = scores.topk(2).indices
        counts = torch.bincount(chosen.flatten(), minlength=4)
        rows = scores[chosen[:, 0] == 0]
    assert counts.tolist() == [3, 3, 3, 3]
    assert rows.shape == (3, 4)
    assert chosen[1].tolist() == [2, 3]
