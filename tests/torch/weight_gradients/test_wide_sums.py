"""Products that add a weight's gradient to its float32 sum: on a CPU, which has no such product, an emulation adds."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from products_added import add_product_in_float32

from ppctl.model.linear import Linear, columns
from ppctl.weight_gradients.deferred import DeferredGradients, collecting
from ppctl.weight_gradients.products import spaced
from ppctl.weight_gradients.wide_sums import WideSum


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    monkeypatch.setattr(WideSum, "add_product", add_product_in_float32)


def one_sum():
    held = []
    return held, WideSum(lambda: held[0] if held else None, held.append)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_a_sum_gets_products_that_nobody_has_rounded(later, bias):
    torch.manual_seed(0)
    layer, (held, total) = Linear(24, 40, bias=bias).bfloat16(), one_sum()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    layer.weight.wide_sum = total
    expected = torch.zeros(40, 24)
    for _ in range(3):
        x, g = torch.randn(2, 5, 24).bfloat16().requires_grad_(), torch.randn(2, 5, 40).bfloat16()
        deferred = DeferredGradients()
        with collecting(deferred) if later else nullcontext():
            out = layer(x)
        assert torch.equal(out, F.linear(x, layer.weight, layer.bias))
        with collecting(deferred, backward=True) if later else nullcontext():
            out.backward(g)
        assert len(held) == (not later or expected.any())
        deferred.deliver()
        expected += g.flatten(0, 1).float().t() @ x.detach().flatten(0, 1).float()
        alone = x.detach().requires_grad_()
        assert torch.equal(x.grad, torch.autograd.grad(F.linear(alone, layer.weight), alone, g)[0])
    assert len(held) == 1 and torch.equal(held[0], expected) and layer.weight.grad is None
    assert not bias or layer.bias.grad is not None


def in_one_go_or_two(later, make, gradients):
    """Runs `make`, the backward of its results, and W if weights' gradients come `later`."""
    deferred = DeferredGradients()
    with collecting(deferred) if later else nullcontext():
        made = make()
    with collecting(deferred, backward=True) if later else nullcontext():
        torch.autograd.backward(made, gradients)
    deferred.deliver()
    return made


@pytest.mark.parametrize("later", [False, True])
def test_projections_of_one_input_add_up_its_gradient_and_make_the_sums_of_their_own(later):
    torch.manual_seed(0)
    layers, held = [Linear(24, width).bfloat16() for width in (40, 16, 16)], []
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        sums, layer.weight.wide_sum = one_sum()
        held.append(sums)
    x = torch.randn(2, 5, 24).bfloat16().requires_grad_()
    gradients = [torch.randn(2, 5, len(layer.weight)).bfloat16() for layer in layers]
    made = in_one_go_or_two(later, lambda: columns(x, *layers), gradients)
    alone = x.detach().requires_grad_()
    plain = [F.linear(alone, layer.weight.detach()) for layer in layers]
    torch.autograd.backward(plain, gradients)
    assert all(map(torch.equal, made, plain))
    assert torch.equal(x.grad, alone.grad), "on a CPU one after the other, as autograd does"
    for layer, sums, gradient in zip(layers, held, gradients, strict=True):
        assert torch.equal(sums[0], gradient.flatten(0, 1).float().t() @ alone.detach().flatten(0, 1).float())
        assert layer.weight.grad is None


def test_on_a_device_the_product_adds_to_the_gradient_of_the_input_in_its_memory():
    layers = [Linear(24, 40).bfloat16().to("meta") for _ in range(3)]
    for layer in layers:
        layer.weight.wide_sum = WideSum(lambda: None, lambda total: None)
    x = torch.empty(2, 5, 24, dtype=torch.bfloat16, device="meta", requires_grad=True)
    made, seen = columns(x, *layers), []

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func._opname)
            return func(*args, **(kwargs or {}))

    with Names(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(WideSum, "add_product", lambda *_: None)
        (of_x,) = torch.autograd.grad(made, [x], [torch.empty_like(each) for each in made])
    assert of_x.shape == x.shape
    assert (seen.count("mm"), seen.count("addmm"), seen.count("add"), seen.count("add_")) == (1, 2, 0, 0)


@pytest.mark.parametrize("later", [False, True])
def test_a_product_with_gaps_is_the_plain_one_taken_apart(later):
    torch.manual_seed(0)
    heads, widths, gap = 3, [8, 4], 2
    weight = torch.nn.Parameter(torch.randn(heads * sum(widths), 24).bfloat16())
    held, weight.wide_sum = one_sum()
    x, between = (torch.randn(*shape).bfloat16() for shape in ((2, 5, 24), (2, 1, 5, gap)))
    gradients = [torch.randn(2, heads, 5, width).bfloat16() for width in (10, 4)]
    inputs, others = ([each.clone().requires_grad_() for each in (x, between)] for _ in range(2))
    made = in_one_go_or_two(later, lambda: spaced(inputs[0], weight, inputs[1], widths), gradients)
    whole = F.linear(others[0], weight.detach())
    whole.retain_grad()
    plain, values = whole.unflatten(-1, (heads, -1)).transpose(1, 2).split(widths, -1)
    keys = torch.cat((plain, others[1].expand(-1, heads, -1, -1)), -1)
    torch.autograd.backward([keys, values], gradients)
    assert torch.equal(made[0], keys) and torch.equal(made[1], values)
    assert made[0].untyped_storage().nbytes() == keys.nbytes + values.nbytes
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(inputs, others, strict=True))
    assert torch.equal(held[0], whole.grad.flatten(0, 1).float().t() @ x.flatten(0, 1).float())


def test_views_and_what_is_not_trained_go_the_usual_way():
    layer, (held, total) = Linear(24, 40).bfloat16(), one_sum()
    torch.nn.init.normal_(layer.weight)
    layer.weight.wide_sum = total
    x = torch.randn(5, 24).bfloat16().requires_grad_()
    F.linear(x, layer.outputs(slice(0, 8)).weight).sum().backward()
    assert layer.weight.grad is not None and not held
    layer.weight.grad = None
    layer.weight.requires_grad_(requires_grad=False)
    layer(x).sum().backward()
    assert layer.weight.grad is None and not held


def test_forwards_without_a_graph_add_nothing():
    layer, (held, total) = Linear(24, 40).bfloat16(), one_sum()
    torch.nn.init.normal_(layer.weight)
    layer.weight.wide_sum = total
    with torch.no_grad():
        assert layer(torch.ones(3, 24).bfloat16()).shape == (3, 40)
    assert not held
