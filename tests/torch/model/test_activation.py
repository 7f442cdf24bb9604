"""The kernels of SwiGLU that a GPU compiles, compiled for this CPU, against torch's steps; and their calls."""

import ctypes
import shutil
import subprocess

import pytest
import torch
from cuts import tiny

from ppctl.model import activation as module
from ppctl.model.feed_forward import Experts, FeedForward
from ppctl.model.kernels import ON_CPU, Kernels
from ppctl.model.router import Router
from ppctl.model.split import ALONE

WRAPPER = """
#include <cmath>
#include <cstdint>
#include <cstring>
namespace at { struct BFloat16 {  // to the nearest, halves to even, as a GPU converts
  float kept;
  explicit BFloat16(float value) {
    uint32_t bits; std::memcpy(&bits, &value, 4);
    bits += 0x7fff + ((bits >> 16) & 1); bits &= 0xffff0000;
    std::memcpy(&kept, &bits, 4);
  }
  operator float() const { return kept; }
}; }
namespace forward { %s }
namespace backward { %s }
namespace weighted { %s }
namespace shares { %s }
namespace of_shares { %s }
extern "C" void kernel(int which, long n, const float* g, const float* x, const float* up, const float* w,
                       float* a, float* b, float* c) {
  for (long i = 0; i < n; ++i) {
    if (which == 1) forward::swiglu<float>(x[i], up[i], w[i], a[i]);
    if (which == 2) backward::swiglu<float>(g[i], x[i], up[i], w[i], a[i], b[i]);
    if (which == 3) weighted::swiglu<float>(g[i], x[i], up[i], w[i], a[i], b[i], c[i]);
    if (which == 4) shares::share<float>(x[i], up[i], w[i], a[i]);
    if (which == 5) of_shares::share<float>(g[i], x[i], up[i], w[i], a[i], b[i]);
  }
}
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    """The kernels on a CPU, in the place of CUDA's."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    folder = tmp_path_factory.mktemp("kernels")
    source, built = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(WRAPPER % (*module.TEXTS.values(), *module.SHARES.values()))
    flags = ["-O1", "-ffp-contract=off", "-std=c++17", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, str(source), "-o", str(built)], check=True, timeout=100)
    compiled = ctypes.CDLL(str(built)).kernel

    def run(gradient, x, up, weights, first=0):
        given = [x if gradient is None else gradient, x, up, torch.ones(1, 1) if weights is None else weights]
        wide = [each.expand(x.shape).float().contiguous() for each in given]
        made = [torch.empty_like(wide[0]) for _ in range(3)]
        places = [ctypes.c_void_p(each.data_ptr()) for each in (*wide, *made)]
        outputs = module._results(gradient, None if first else weights)
        compiled(first + outputs, ctypes.c_long(x.numel()), *places)
        return [each.to(x.dtype) for each in made[:outputs]]

    library = torch.library.Library("ppctl", "IMPL")
    library.impl("swiglu", run, "CPU")
    library.impl("share", lambda g, x, total, scale: run(g, x, total, torch.tensor([[scale]]), first=3), "CPU")
    yield
    library._destroy()


def dice(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def few_differ(found, steps):
    """Equal, but where two ways to the exponential function differ in the last bit of float32, on which a rounding
    depends once in 2^16 numbers or so."""
    assert found.dtype == steps.dtype == torch.bfloat16
    assert (found != steps).float().mean() <= 1e-3
    assert torch.allclose(found, steps, rtol=2**-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_a_kernel_rounds_where_the_steps_round(kernel, weighted):
    gradient, x, up = (dice(300, 64, seed=seed) * 3 for seed in range(3))
    weights = dice(300, 1, seed=4) if weighted else None
    found = [*torch.ops.ppctl.swiglu(None, x, up, weights), *torch.ops.ppctl.swiglu(gradient, x, up, weights)]
    steps = [*module.by_steps(None, x, up, weights), *module.by_steps(gradient, x, up, weights)]
    assert len(found) == len(steps) == (4 if weighted else 3)
    for one, other in zip(found, steps, strict=True):
        few_differ(one, other)


@pytest.mark.parametrize("kind", ["none", "aux_loss", "seq_aux_loss"])
def test_a_routers_kernels_give_the_bits_of_the_steps_where_scores_are_normalised(kernel, kind):
    model = tiny(
        num_moe_experts=8, moe_router_topk=3, moe_router_score_function="sigmoid", moe_router_topk_scaling_factor=2.5,
        moe_router_load_balancing_type=kind, moe_aux_loss_coeff=0.1,
    )  # fmt: skip
    results = []
    for fused in (True, False):
        router = Router(model, fused=fused)
        router.weight.data = torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1)) * 4
        x = torch.randn(2, 50, model.hidden_size, generator=torch.Generator().manual_seed(2)).requires_grad_()
        found = router(x)
        objective = found.weights.square().sum() + (0 if found.auxiliary is None else found.auxiliary)
        results.append([found.weights, *torch.autograd.grad(objective, [x, router.weight])])
        assert ("_Normalised" in str(found.weights.grad_fn)) == fused
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", ["experts", "feed-forward"])
def test_blocks_call_the_kernels_and_keep_no_more_than_their_operands(kernel, kind, monkeypatch):
    model = tiny(hidden_size=16, num_moe_experts=4, moe_ffn_hidden_size=24)
    rows, results = dice(40, 16, seed=5).requires_grad_(), []
    weights, counts = dice(40, 1, seed=6).requires_grad_(), torch.tensor([10, 0, 25, 5])
    for kernels in (Kernels(fuses_swiglu=True), ON_CPU):
        block = Experts(model, kernels) if kind == "experts" else FeedForward(model, 24, kernels)
        block = block.bfloat16()
        for seed, parameter in enumerate(block.parameters()):
            parameter.data = dice(*parameter.shape, seed=10 + seed) * 0.3
        out = block(rows, weights, counts) if kind == "experts" else block(rows[None])
        inputs = [rows, *([weights] if kind == "experts" else []), *block.parameters()]
        results.append([out, *torch.autograd.grad(out, inputs, dice(*out.shape, seed=7))])
        if kernels is not ON_CPU:
            monkeypatch.setattr(module, "by_steps", None)
            block(rows, weights, counts) if kind == "experts" else block(rows[None])
            monkeypatch.undo()
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()


@pytest.mark.parametrize("wide", [(0, 1), (0,), (1,)])
def test_wide_numbers_go_by_steps(kernel, wide):
    """The kernels are for bfloat16 alone."""
    x, up, gradient = (dice(40, 24, seed=seed) for seed in range(3))
    x, up = (each.float() if place in wide else each for place, each in enumerate((x, up)))
    x, up = x.requires_grad_(), up.requires_grad_()
    results = []
    for fused in (True, False):
        out = module.activation(x, up, fused=fused)
        results.append([out, *torch.autograd.grad(out, [x, up], gradient.to(out.dtype))])
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


def test_a_split_feed_forward_with_a_bias_fuses_under_autocast(kernel, monkeypatch):
    model, results = tiny(hidden_size=16, add_bias_linear=True), []
    for fused in (True, False):
        torch.manual_seed(0)
        block = FeedForward(model, 24, Kernels(fuses_swiglu=fused))
        for parameter in block.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        block.split = type(ALONE)()  # of one rank, as a split of several is used
        rows = dice(1, 40, 16, seed=5).float().requires_grad_()
        if fused:
            monkeypatch.setattr(module, "by_steps", None)
        with torch.autocast("cpu", torch.bfloat16):
            out = block(rows)
        results.append([out, *torch.autograd.grad(out.float().sum(), [rows, *block.parameters()])])
        monkeypatch.undo()
    for one, other in zip(*results, strict=True):
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()


def test_only_kernels_that_are_needed_are_tried_and_a_rank_says_why_it_has_none(monkeypatch, capsys):
    tried = []

    def by_kernel(gradient, x, up, weights):
        tried.append((gradient is not None, weights is not None))
        return module.by_steps(gradient, x, up, weights)

    monkeypatch.setattr(module, "_by_kernel", by_kernel)
    monkeypatch.setattr(module, "_shares_by_kernel", None)
    assert module.fuses_swiglu(torch.device("cpu"), weighted=False)
    monkeypatch.setattr(module, "_shares_by_kernel", module._shares_by_steps)
    assert tried == [(False, False), (True, False)]
    assert module.fuses_swiglu(torch.device("cpu"), weighted=True)
    assert len(tried) == 6 and tried[-1] == (True, True)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("RANK", "7")
    for broken, said in (
        (lambda *_: [torch.zeros(24, 16).bfloat16()], "the kernel's numbers are not those of the steps"),
        (lambda *_: (_ for _ in ()).throw(RuntimeError("no NVRTC\nat line 1")), "no NVRTC"),
    ):
        monkeypatch.setattr(module, "_by_kernel", broken)
        assert not module.fuses_swiglu(torch.device("cpu"), weighted=False)
        assert capsys.readouterr().err == f"rank 7: SwiGLU goes step by step: {said}\n"
    monkeypatch.setattr(module, "_by_kernel", by_kernel)
    monkeypatch.setattr("sys._is_gil_enabled", lambda: False, raising=False)
    assert not module.fuses_swiglu(torch.device("cpu"), weighted=False)
    assert "GIL" in capsys.readouterr().err
