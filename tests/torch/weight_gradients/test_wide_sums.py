"""Products that add a weight's gradient to its float32 sum: on a CPU, which has no such product, an emulation adds."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from products_added import add_product_in_float32

from ppctl.model.linear import Linear
from ppctl.weight_gradients.deferred import DeferredGradients, collecting
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
