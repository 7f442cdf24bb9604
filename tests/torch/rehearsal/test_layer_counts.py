"""Kernels and their bytes by kind of layer, each counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ppctl.model.recompute import Switch
from ppctl.model.recompute import _checkpointed as checkpointed
from ppctl.records.rehearsal_record import BACKWARD, FORWARD, LayerKernels
from ppctl.rehearsal.ledger import DeviceLedger

ROWS, WIDTH = 8, 16
X = ROWS * WIDTH * 4
"""Bytes of an activation."""
W = WIDTH * WIDTH * 4
"""Of a weight."""


def on_device(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


class Layer(nn.Module):
    """A function of an activation, and a weight where it has one."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(on_device(WIDTH, WIDTH))

    def forward(self, x):
        return self.function(x, self.weight)


def counted(function, x=None, passes=1):
    """(forward, backward) of one layer: (kernels, others, other_bytes) each."""
    x = on_device(ROWS, WIDTH).requires_grad_() if x is None else x
    with DeviceLedger() as ledger:
        layer = Layer(function)
        ledger.watch_layers([(layer, "decoder")])
        for _ in range(passes):
            ledger.during = FORWARD
            out = layer(x)
            ledger.during = BACKWARD
            gradient = torch.empty_like(out)
            torch.autograd.grad(out, [x], gradient) if passes == 1 else out.backward(gradient)
    forward, backward = ledger.layers
    assert (forward.during, backward.during, forward.passes, backward.passes) == (FORWARD, BACKWARD, passes, passes)
    return tuple((each.kernels, each.others, each.other_bytes) for each in ledger.layers)


BY_HAND = {
    "an elementwise function": (lambda x, w: x.exp(), (1, 1, 2 * X), (1, 1, 3 * X)),
    "a product": (lambda x, w: F.linear(x, w), (1, 0, 0), (1, 0, 0)),
    "a product and a residual": (lambda x, w: x + F.linear(x, w), (2, 1, 3 * X), (2, 1, 3 * X)),
    "views": (lambda x, w: x.t().view(-1, ROWS // 2, 2).unsqueeze(0).exp(), (1, 1, 2 * X), (1, 1, 3 * X)),
    "in place": (lambda x, w: (x * 2.0).exp_(), (2, 2, 4 * X), (2, 2, 3 * X + 2 * X)),
    "an expanded operand counts what is in memory": (
        lambda x, w: x * on_device(WIDTH).expand(ROWS, WIDTH),
        (1, 1, 2 * X + 4 * WIDTH),
        (1, 1, 2 * X + 4 * WIDTH),
    ),
    "the same operand twice is read once": (lambda x, w: x * x, (1, 1, 2 * X), (3, 3, 3 * X + 3 * X + 3 * X)),
    "memory without values": (lambda x, w: x.exp() + torch.empty_like(x), (2, 2, 5 * X), (1, 1, 3 * X)),
    "into given memory": (
        lambda x, w: torch.exp(x.detach(), out=on_device(ROWS, WIDTH)) * x,
        (2, 2, 5 * X),
        (1, 1, 3 * X),
    ),
    "rows that are looked up": (
        lambda x, w: x.index_select(0, on_device(2, dtype=torch.int64)),
        (1, 1, 2 * (X // 4) + 16),
        (2, 2, X + 2 * X + X // 4 + 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_kernels_and_bytes_are_those_counted_by_hand(name):
    function, forward, backward = BY_HAND[name]
    assert counted(function) == (forward, backward)


def test_sums_of_a_weights_gradients_belong_to_its_layer():
    _, (kernels, others, size) = counted(lambda x, w: F.linear(x, w), on_device(ROWS, WIDTH).requires_grad_(), passes=2)
    assert (kernels, others) == (2 * 2 + 2, 2), "two products each, and the sums of the second with the first"
    assert size == 3 * W + 3 * X


def test_layers_are_told_apart_and_what_is_beside_them_is_left_out():
    with DeviceLedger() as ledger:
        first, second = Layer(lambda x, w: x.exp()), Layer(lambda x, w: x.sin().cos())
        ledger.watch_layers([(first, "decoder"), (second, "mtp")])
        x = on_device(ROWS, WIDTH).requires_grad_()
        ledger.during = FORWARD
        loss = second(first(x * 3) * 2).sum()
        ledger.during = BACKWARD
        loss.backward()
    assert ledger.layers == (
        LayerKernels("decoder", FORWARD, 1, 1, 1, 2 * X, 0),
        LayerKernels("decoder", BACKWARD, 1, 1, 1, 3 * X, 0),
        LayerKernels("mtp", FORWARD, 1, 2, 2, 4 * X, 0),
        LayerKernels("mtp", BACKWARD, 1, 5, 5, 11 * X + 4, 0),
    ), "cosine: sin, neg and a product with one expanded gradient; sine: cos and a product"


def test_a_wait_of_a_layer_is_its_own():
    def waits(x, w):
        float(x.detach().sum())
        return x.exp()

    with DeviceLedger() as ledger:
        layer = Layer(waits)
        ledger.watch_layers([(layer, "decoder")])
        ledger.during = FORWARD
        layer(on_device(ROWS, WIDTH).requires_grad_())
        float(on_device(1))
    assert [each.host_waits for each in ledger.layers] == [1, 0]
    assert sum(wait.count for wait in ledger.host_waits) == 2


def test_a_second_forward_belongs_to_the_backward():
    x = on_device(ROWS, WIDTH).requires_grad_()
    with DeviceLedger() as ledger:
        layer = Layer(lambda x, w: x.exp().exp())
        ledger.watch_layers([(layer, "decoder")])
        ledger.during = FORWARD
        out = checkpointed(layer, Switch())(x)
        ledger.during = BACKWARD
        torch.autograd.grad(out, [x], torch.empty_like(out))
    forward, backward = ledger.layers
    assert (forward.passes, forward.kernels, backward.passes, backward.kernels) == (1, 2, 1, 4)
