"""Heads are turned as the formula says, step by step, to the bit: values and gradients, in fewer passes."""

from functools import partial

import pytest
import torch
from cuts import tiny

from ppctl.model.rotary import Rotary, rotate, rotate_heads

HALF, ROWS, HEADS, LENGTH = 4, 2, 3, 11
SHAPES = {
    "whole heads": (2 * HALF, 0, False),
    "first dimensions": (2 * HALF + 6, 0, False),
    "last dimensions": (2 * HALF + 6, 6, False),
    "neighbours": (2 * HALF, 0, True),
    "last dimensions, neighbours": (2 * HALF + 6, 6, True),
    "in the middle": (2 * HALF + 8, 3, False),
}


def stepwise(x, turns, first, interleaved):
    """x cos + (-high, low) sin, by torch's own operations."""
    cos, sin = (torch.cat((turns[..., number, :],) * 2, dim=-1) for number in (0, 1))
    stop = first + cos.shape[-1]
    head = x[..., first:stop]
    if interleaved:
        head = torch.cat((head[..., 0::2], head[..., 1::2]), dim=-1)
    low, high = head.chunk(2, dim=-1)
    turned = head * cos + torch.cat((-high, low), dim=-1) * sin
    return torch.cat((x[..., :first], turned, x[..., stop:]), dim=-1)


def tables(dtype, *, own):
    """Of positions in order, or of each row's own."""
    rotary = Rotary(tiny(hidden_size=2 * HALF, num_attention_heads=1, num_query_groups=1))
    positions = torch.randint(LENGTH, (ROWS, LENGTH), generator=torch.Generator().manual_seed(2)) if own else None
    turns = rotary.turns(torch.empty(0, dtype=dtype), LENGTH, positions)
    assert turns.shape == ((ROWS, 1, LENGTH, 2, HALF) if own else (LENGTH, 2, HALF))
    return turns


@pytest.mark.parametrize("own", [False, True], ids=["in order", "own positions"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_and_gradients_have_the_bits_of_the_formula(shape, dtype, own):
    width, first, interleaved = SHAPES[shape]
    turns, draw = tables(dtype, own=own), torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, LENGTH, HEADS, width, generator=draw).to(dtype).transpose(1, 2)
    gradient = torch.randn(ROWS, HEADS, LENGTH, width, generator=draw).to(dtype)
    outputs, gradients = [], []
    for turn in (
        partial(rotate, first=first, interleaved=interleaved),
        partial(in_place, first=first, interleaved=interleaved),
        partial(stepwise, first=first, interleaved=interleaved),
    ):
        leaf = x.clone().requires_grad_()
        outputs.append(turn(leaf, turns))
        gradients += torch.autograd.grad(outputs[-1], [leaf], gradient.clone())
    for each in (outputs, gradients):
        assert torch.equal(each[0], each[2])
        assert torch.equal(each[1], each[2])


def in_place(x, turns, **how):
    """Heads turned in the memory of a projection's result."""
    projected = x.transpose(1, 2).flatten(2) * 1
    out = rotate_heads(projected, HEADS, turns, own=True, **how)
    assert out.data_ptr() == projected.data_ptr()
    return out


def test_a_tokens_heads_lie_side_by_side_also_in_the_gradient():
    x = torch.randn(ROWS, HEADS, LENGTH, 2 * HALF).requires_grad_()
    out = rotate(x, tables(torch.float32, own=False))
    (gradient,) = torch.autograd.grad(out, [x], torch.ones_like(x))
    assert out.transpose(1, 2).is_contiguous()
    assert gradient.transpose(1, 2).is_contiguous()


def test_without_positions_to_turn_by_heads_stay_as_they_are():
    x = torch.randn(ROWS, HEADS, LENGTH, 2 * HALF)
    assert rotate(x, None) is x


class Kernels(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations that write."""

    seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += not (func.is_view or "empty" in str(func) or "detach" in str(func))
        return func(*args, **(kwargs or {}))


def test_in_place_only_what_is_turned_is_written_and_no_gradient_of_its_own():
    turns, x = tables(torch.float32, own=False), torch.randn(ROWS, LENGTH, HEADS * (2 * HALF + 6), requires_grad=True)
    projected = x.clone()
    with Kernels() as forward:
        out = rotate_heads(projected, HEADS, turns, first=6, own=True)
    gradient = torch.ones_like(out.transpose(1, 2)).transpose(1, 2)
    with Kernels() as backward:
        (of_projected,) = torch.autograd.grad(out, [x], gradient)
    assert (forward.seen, backward.seen) == (3, 3)
    assert of_projected.data_ptr() == gradient.data_ptr()


@pytest.mark.parametrize(("shape", "kernels"), [("whole heads", 3), ("last dimensions", 4), ("in the middle", 5)])
def test_turning_takes_three_passes_over_what_is_turned_and_one_over_each_rest(shape, kernels):
    width, first, _ = SHAPES[shape]
    turns, x = tables(torch.float32, own=False), torch.randn(ROWS, HEADS, LENGTH, width, requires_grad=True)
    with Kernels() as forward:
        out = rotate(x, turns, first=first)
    gradient = torch.ones_like(out)
    with Kernels() as backward:
        torch.autograd.grad(out, [x], gradient)
    assert (forward.seen, backward.seen) == (kernels, kernels)
