"""Initial weights are a function of the seed and the canonical name, and of nothing else."""

import hashlib
import math
import random
import time
from threading import Lock

import pytest
import torch
from cuts import cut, tiny

from ppctl.config.schema import ModelConfig
from ppctl.cost.parameter_counts import stage_count
from ppctl.geometry.canonical_names import canonical_names
from ppctl.geometry.layers import parse_layers
from ppctl.model import initialize
from ppctl.model.initialize import initial_value, normal
from ppctl.model.stage import build_stage, meta_stage

CUTS = [("EttttL", 1), ("Ett|ttL", 2), ("E|t|t|t|t|L", 2), ("Et|t||ttL", 4), ("E|tt||t|t|L", 3)]


def parameters(layout, pp, model, seed=3, dtype=torch.float32, order=None):
    specs = cut(layout, pp)
    if order is not None:
        random.Random(order).shuffle(specs)
    stages = [build_stage(spec, model, seed=seed, dtype=dtype, device="cpu") for spec in specs]
    return {name: p.detach() for stage in stages for name, p in stage.canonical_parameters().items()}


def sha256(weights):
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("tied", [False, True])
def test_the_state_dict_is_the_same_for_every_cut_and_order_of_construction(tied):
    model = tiny(share_embeddings_and_output_weights=tied)
    assert len({sha256(parameters(*case, model, order=order)) for case in CUTS for order in (None, 1)}) == 1


@pytest.mark.parametrize(("threads", "memory", "most"), [(3, 2**40, 4), (3, 0, 1), (1, 2**40, 2)])
def test_threads_draw_ahead_as_many_as_there_are_and_as_memory_has_room_for(monkeypatch, threads, memory, most):
    held, lock = [0, 0], Lock()

    def drawn(*arguments):
        with lock:
            held[0] += 1
            held[1] = max(held)
        return initial_value(*arguments)

    def fill(one):
        held[0] -= 1
        fills(one)

    expected, fills = sha256(parameters("EttttL", 1, tiny())), initialize._Drawn.fill
    monkeypatch.setattr(initialize, "own_share", lambda: (threads, memory))
    monkeypatch.setattr(initialize, "initial_value", drawn)
    monkeypatch.setattr(initialize._Drawn, "fill", fill)
    assert sha256(parameters("EttttL", 1, tiny())) == expected
    assert 1 <= held[1] <= most


def test_an_error_does_not_wait_for_draws_that_nobody_has_begun(monkeypatch):
    begun = []

    def drawn(*arguments):
        begun.append(arguments)
        time.sleep(0.3)

    def fill(one):
        raise MemoryError

    monkeypatch.setattr(initialize, "own_share", lambda: (1, 2**40))
    monkeypatch.setattr(initialize, "initial_value", drawn)
    monkeypatch.setattr(initialize._Drawn, "fill", fill)
    with pytest.raises(MemoryError):
        parameters("EttttL", 1, tiny())
    assert len(begun) == 1


def test_global_random_state_is_neither_read_nor_moved():
    before = torch.random.get_rng_state()
    first = sha256(parameters("EttttL", 1, tiny()))
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(99)
    assert sha256(parameters("EttttL", 1, tiny())) == first


def test_another_seed_or_name_is_another_draw():
    draws = [normal(seed, name, (64,), 1.0) for seed in (0, 1, 10) for name in ("layers.1.w", "layers.11.w", "0.w")]
    assert len({draw.numpy().tobytes() for draw in draws}) == len(draws)


def test_no_two_matrices_of_a_model_start_equal():
    weights = parameters("EttttL", 1, tiny())
    matrices = [w.numpy().tobytes() for w in weights.values() if w.dim() > 1]
    assert len(set(matrices)) == len(matrices)


def test_the_draw_is_frozen():
    """A change here means that seeds no longer name the weights that they named: say so in the changelog."""
    draw = normal(1234, "layers.37.attention.wq.weight", (2, 2), 0.02)
    assert [float(x).hex() for x in draw.flatten()] == [
        "0x1.6e0d660000000p-11",
        "-0x1.305e160000000p-8",
        "0x1.1a8e080000000p-8",
        "-0x1.2cef560000000p-5",
    ]


def test_deviations_follow_init_method_std_and_residual_outputs_the_number_of_layers():
    model = tiny(hidden_size=256, ffn_hidden_size=512, num_layers=8, init_method_std=0.03)
    layers = parse_layers(["embedding", "decoder.5", "loss"])
    for name in canonical_names(model, layers):
        shape = dict(meta_stage(layers, model).named_parameters())[name].shape
        value = initial_value(name, model, seed=1)
        assert value.shape == shape
        if len(shape) == 1:
            assert torch.equal(value, torch.ones(shape)), name
            continue
        residual = name.endswith(("attention.wo.weight", "feed_forward.w2.weight"))
        expected = 0.03 / math.sqrt(16) if residual else 0.03
        error = 5 / math.sqrt(value.numel())  # five standard errors
        assert value.std().item() == pytest.approx(expected, rel=error), name
        assert abs(value.mean().item()) < expected * error, name


def test_biases_start_at_zero_and_norms_at_one():
    weights = parameters("EttttL", 1, tiny(add_qkv_bias=True, qk_layernorm=True))
    for name, weight in weights.items():
        if name.endswith(".bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert torch.equal(weight, torch.ones_like(weight)), name
    assert sum(name.endswith(".bias") for name in weights) == 12
    assert sum("norm" in name for name in weights) == 4 * 4 + 1


def test_bfloat16_weights_are_the_float32_draw_rounded():
    full = parameters("EttttL", 1, tiny())
    for name, weight in parameters("EttttL", 1, tiny(), dtype=torch.bfloat16).items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, full[name].bfloat16()), name


def test_tied_uses_start_equal_and_untied_ones_do_not():
    tied = parameters("Ett|ttL", 2, tiny(share_embeddings_and_output_weights=True))
    untied = parameters("Ett|ttL", 2, tiny())
    assert torch.equal(tied["output.weight"], tied["tok_embeddings.weight"])
    assert not torch.equal(untied["output.weight"], untied["tok_embeddings.weight"])
    assert torch.equal(tied["tok_embeddings.weight"], untied["tok_embeddings.weight"])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        # E 52x24, a layer 24x24 (wq) + 2x12x24 + 24x24 (wo) + 3x40x24 + 2x24, L 24 + 52x24
        ({}, 52 * 24 + 4 * (24 * 24 * 2 + 2 * 12 * 24 + 3 * 40 * 24 + 48) + 24 + 52 * 24),
        ({"share_embeddings_and_output_weights": True}, 52 * 24 + 4 * (1152 + 576 + 2880 + 48) + 24 + 52 * 24),
        ({"num_query_groups": None}, 52 * 24 + 4 * (24 * 24 * 4 + 2880 + 48) + 24 + 52 * 24),
        ({"kv_channels": 10}, 52 * 24 + 4 * (2 * 24 * 40 + 2 * 24 * 20 + 2880 + 48) + 24 + 52 * 24),
        ({"add_qkv_bias": True}, 52 * 24 + 4 * (1152 + 576 + 2880 + 48 + 24 + 2 * 12) + 24 + 52 * 24),
        ({"qk_layernorm": True}, 52 * 24 + 4 * (1152 + 576 + 2880 + 48 + 2 * 6) + 24 + 52 * 24),
    ],
)
def test_parameters_count_as_the_closed_form_says(changes, expected):
    model, specs = tiny(**changes), cut("E|tt||tt|L", 1)
    assert sum(p.numel() for spec in specs for p in meta_stage(spec.layers, model).parameters()) == expected
    for spec in specs:
        built = sum(p.numel() for p in meta_stage(spec.layers, model).parameters())
        assert built == stage_count(model, spec.layers).total(), spec.layers


def test_llama3_8b_has_its_published_number_of_parameters():
    sizes = {"num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 14336, "num_attention_heads": 32}
    model = ModelConfig(**sizes, num_query_groups=8, vocab_size=128256)
    layers = parse_layers(["embedding", *(f"decoder.{i}" for i in range(32)), "loss"])
    built = sum(p.numel() for p in meta_stage(layers, model).parameters())
    assert built == stage_count(model, layers).total() == 8_030_261_248
