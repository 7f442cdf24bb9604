"""Compiled layers: the same numbers within a millionth, the same names; a missing compiler is told before a step."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ppctl.config.schema import ModelConfig, TrainConfig
from ppctl.errors import ConfigError
from ppctl.geometry.layers import parse_layers
from ppctl.model import attention
from ppctl.model.attention import core_attention
from ppctl.model.compile import compile_stage
from ppctl.model.dropout import Draws, sample_key
from ppctl.model.fp8 import E5M2, Fp8
from ppctl.model.kernels import Kernels
from ppctl.model.linear import multiply_in_float32
from ppctl.model.packing import ROWS, Documents, Packing
from ppctl.model.recompute import recompute
from ppctl.model.stage import build_stage
from ppctl.plan import StageSpec

MODEL = ModelConfig(num_layers=1, hidden_size=16, ffn_hidden_size=24, num_attention_heads=2, vocab_size=32)
CPU = torch.device("cpu")


def stage():
    spec = StageSpec(0, 0, 0, parse_layers(["embedding", "decoder.0"]), (), (), 0, 0, 0)
    return build_stage(spec, MODEL, seed=1, dtype=torch.float32, device=CPU)


def run(module, packing=ROWS):
    """(output, gradients by name) of one microbatch."""
    outputs = module(torch.arange(64).view(2, 32) % 32, packing=packing)
    out = outputs[0] if isinstance(outputs, tuple) else outputs
    out.square().sum().backward()
    return {"output": out.detach()} | {name: p.grad for name, p in module.canonical_parameters().items()}


@pytest.mark.shows("train.compile")
@pytest.mark.whole  # the compiler takes half a minute
def test_a_compiled_stage_agrees_to_a_millionth():
    compiled = stage()
    compile_stage(compiled, CPU)
    torch._dynamo.utils.counters.clear()
    expected, got = run(stage()), run(compiled)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


def test_a_layer_with_latent_attention_is_one_graph():
    latent = dict(
        multi_latent_attention=True, q_lora_rank=8, kv_lora_rank=8, qk_head_dim=8, qk_pos_emb_head_dim=4, v_head_dim=8
    )
    spec = StageSpec(0, 0, 0, parse_layers(["embedding", "decoder.0"]), (), (), 0, 0, 0)
    made = build_stage(spec, replace(MODEL, **latent), seed=1, dtype=torch.float32, device=CPU)
    torch._dynamo.reset()
    found = torch._dynamo.explain(lambda tokens: made(tokens, packing=ROWS))(torch.arange(64).view(2, 32) % 32)
    assert found.graph_break_count == 0, found.break_reasons


@pytest.mark.whole
@pytest.mark.timeout(300)  # the compiler again, for two sets of lengths
def test_documents_that_are_kept_apart_agree_too_whatever_their_lengths():
    compiled, plain = stage(), stage()
    compile_stage(compiled, CPU, packed=True)
    for lengths in (((10, 22), (32,)), ((5, 5, 22), (31, 1))):
        packing = Packing(None, Documents(lengths))
        expected, got = run(plain, packing), run(compiled, packing)
        for name, value in expected.items():
            assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


def test_compiling_changes_no_name_and_a_missing_compiler_is_told_before_the_first_step(monkeypatch):
    compiled = stage()
    monkeypatch.setenv("CXX", "/nowhere/c++")
    with pytest.raises(ConfigError, match=r"PP-E770.*C\+\+ compiler"):
        compile_stage(compiled, CPU)
    monkeypatch.setenv("CXX", "true")
    compile_stage(compiled, CPU)
    assert compiled.canonical_parameters().keys() == stage().canonical_parameters().keys()


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_gpt3s_blocks_with_dropout_agree_too_and_one_compilation_serves_all_layers():
    """Names' keys are tensors, not numbers: with these every layer would be compiled anew."""
    learned = {"position_embedding_type": "learned_absolute", "normalization": "LayerNorm", "add_bias_linear": True}
    dropped = {"gated_linear_unit": False, "hidden_dropout": 0.1, "attention_dropout": 0.2}
    model = replace(MODEL, num_layers=2, **learned, **dropped)
    spec = StageSpec(0, 0, 0, parse_layers(["embedding", "decoder.0", "decoder.1"]), (), (), 0, 0, 0)
    packing = Packing(draws=Draws(torch.tensor([sample_key(1, 2, 0), sample_key(1, 2, 1)])))
    plain, compiled = (build_stage(spec, model, seed=1, dtype=torch.float32, device=CPU) for _ in range(2))
    torch._dynamo.utils.counters.clear()
    compile_stage(compiled, CPU)
    expected, got = run(plain, packing), run(compiled, packing)
    for name, value in expected.items():
        if not name.endswith("wk.bias"):  # its gradient is zero: rounding alone
            assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), name
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class AloneWithExchanges:
    """One rank of one, which goes through the functions of a divided layer."""

    rank, size, sequence = 0, 1, True

    def start_gather(self, x):
        assert not torch.compiler.is_compiling()
        return x.clone

    start_sum = start_gather

    def add_up(self, x):
        return x

    largest = add_up


@pytest.mark.shows("train.compile", "parallel.tensor_model_parallel_size")
@pytest.mark.whole
@pytest.mark.timeout(300)
def test_what_lies_between_exchanges_is_compiled_once_for_all_layers():
    graphs = []
    for layers in (1, 10):  # more than dynamo compiles anew
        model = replace(MODEL, num_layers=layers)
        spec = StageSpec(
            0, 0, 0, parse_layers(["embedding", *(f"decoder.{n}" for n in range(layers))]), (), (), 0, 0, 0
        )
        plain, compiled = (build_stage(spec, model, seed=1, dtype=torch.float32, device=CPU) for _ in range(2))
        compiled.split_over(AloneWithExchanges())
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compile_stage(compiled, CPU)
        expected, got = run(plain), run(compiled)
        for name, value in expected.items():
            assert (got[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 3


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_attention_is_recomputed_beside_compiled_parts_of_a_layer(monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "core_attention", lambda *args, **named: calls.append(1) or core(*args, **named))
    core = core_attention
    plain, compiled = stage(), stage()
    compile_stage(compiled, CPU)
    recompute(compiled, TrainConfig(compile=True, recompute_granularity="selective"), 0)
    expected = run(plain)
    assert calls.pop() and not calls
    got = run(compiled)
    assert len(calls) == 2, "in the forward and before the backward"
    for name, value in expected.items():
        assert (got[name] - value).abs().max() <= 1e-6 * value.abs().max(), name


def compile_alone(module):
    """Compile a module as a stage's only layer."""
    compile_stage(SimpleNamespace(decoder_layers=lambda: {parse_layers(["decoder.0"])[0]: module}), CPU)


@pytest.mark.parametrize(("has", "options"), [("AVX512", {"cpp.simdlen": 256}), ("AVX2", None), ("DEFAULT", None)])
def test_a_cpu_with_512_bits_is_compiled_for_half_of_them_and_no_other(monkeypatch, has, options):
    asked = {}
    module = nn.Identity()
    monkeypatch.setattr(module, "compile", asked.update)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: has)
    compile_alone(module)
    assert asked == {"dynamic": False, "options": options}


class TwoTiles(nn.Module):
    """At 512 bits one kernel transposes two tiles of bfloat16, as products in 8 bits do: GCC 12 makes NaN of them."""

    def forward(self, a, b):
        rows = a.t().float(), b.t().float()
        return tuple((x / x.abs().amax(1, keepdim=True)).contiguous() for x in rows)


@pytest.mark.whole  # the compiler takes half a minute
@pytest.mark.timeout(300)
def test_two_transposed_tiles_of_bfloat16_in_one_kernel_are_right():
    module = TwoTiles()
    inputs = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    expected = module(*inputs)
    compile_alone(module)
    assert all(map(torch.equal, module(*inputs), expected))


@pytest.mark.whole
@pytest.mark.timeout(300)
def test_products_in_8_bits_agree_within_their_roundings():
    """Sums in another order round a number of 8 bits to its neighbour here and there."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_query_groups": 2}
    module = attention.Attention(replace(MODEL, **sizes), Kernels(fp8=Fp8(E5M2, False, multiply_in_float32))).bfloat16()
    module.wq.fp8 = module.wk.fp8 = module.wv.fp8 = None  # half of what is compiled
    generator = torch.Generator().manual_seed(0)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.02, generator=generator)
    given = torch.randn(2, 1, 64, 64, generator=generator).bfloat16()

    def gradients():
        x = given[0].clone().requires_grad_()
        out = module(x, None)
        return [out, *torch.autograd.grad(out, [x, *module.parameters()], given[1])]

    expected = gradients()
    compile_alone(module)
    for got, value in zip(gradients(), expected, strict=True):
        assert (got - value).float().norm() <= 0.01 * value.float().norm()
