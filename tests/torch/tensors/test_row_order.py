"""Rows in another order: values and gradients of autograd's own form, without sums into zeros."""

import pytest
import torch
from live_memory import LiveBytes

from ppctl.tensors.row_copies import inverse_of, reorder

ROWS, WIDTH = 24, 512
DTYPES = (torch.float32, torch.bfloat16)


def orders(n):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    return order, torch.argsort(order)


def gathered(rows, order, inverse):
    return rows[order]


def random(*shape, dtype, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def cases(dtype):
    """Name -> (ours, autograd's own, their inputs)."""
    order, inverse = orders(ROWS)
    rows = random(ROWS, WIDTH, dtype=dtype)
    return {"reorder": (reorder, gathered, (rows, order, inverse))}


NAMES = list(cases(torch.float32))


def of(function, inputs):
    """(result, gradients of the inputs that have one) for the same gradient of the result."""
    leaves = [each.detach().clone() if isinstance(each, torch.Tensor) else each for each in inputs]
    wanted = [
        leaf.requires_grad_() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point
    ]
    out = function(*leaves)
    gradient = torch.randn(*out.shape, generator=torch.Generator().manual_seed(3)).to(out.dtype)
    return out, torch.autograd.grad(out, wanted, gradient)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_have_the_bits_of_autograds_own(name, dtype):
    ours, plain, inputs = cases(dtype)[name]
    (out, gradients), (expected, expected_gradients) = of(ours, inputs), of(plain, inputs)
    assert out.dtype == dtype
    assert torch.equal(out, expected)
    assert len(gradients) == len(expected_gradients) == 1
    for ours_, theirs in zip(gradients, expected_gradients, strict=True):
        assert ours_.dtype == dtype
        assert torch.equal(ours_, theirs)


def bytes_in_backward(function, inputs):
    """The most bytes that a backward makes at once, in units of its largest tensor: the rows that come or go."""
    out = function(*inputs)
    gradient = torch.ones_like(out)
    size = max(tensor.nbytes for tensor in (out, inputs[0]))
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    with LiveBytes() as live:
        torch.autograd.grad(out, wanted, gradient)
    return live.peak / size


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_holds_one_tensor_of_the_rows_size(name):
    ours, _, inputs = cases(torch.float32)[name]
    assert bytes_in_backward(ours, inputs) <= 1.0


def operators(function, inputs):
    """Names of the operators of a backward."""
    out = function(*inputs)
    wanted = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    seen = set()

    class Names(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(func._opname)
            return func(*args, **(kwargs or {}))

    with Names():
        torch.autograd.grad(out, wanted, torch.ones_like(out))
    return seen


ADDITIONS = {"index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "scatter_add", "scatter_add_"}
"""Into zeros: on a GPU atomic, where several rows may go to one."""


@pytest.mark.parametrize("name", NAMES)
def test_a_backward_gathers(name):
    ours, plain, inputs = cases(torch.float32)[name]
    assert not operators(ours, inputs) & ADDITIONS
    assert operators(plain, inputs) & ADDITIONS


def test_what_is_kept_for_the_backward_is_an_order_and_not_rows():
    order, inverse = orders(ROWS)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        reorder(random(ROWS, WIDTH, dtype=torch.float32), order, inverse)
    assert [tensor.dtype for tensor in kept] == [torch.int64]


def test_the_inverse_is_a_sort_of_the_order():
    order, inverse = orders(ROWS)
    assert torch.equal(inverse_of(order), inverse)
