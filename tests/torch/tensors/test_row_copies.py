"""Copies of rows and their sums, each the gradient of the other, in an order that depends on the numbers alone."""

import pytest
import torch
from live_memory import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from ppctl.tensors.row_copies import RowCopies, copied, set_places, summed, sums

ROWS, WIDTH, NUMBERS = 12, 64, 16


def numbers(times, seed=0):
    dice = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(NUMBERS, generator=dice)[:times].sort().values for _ in range(ROWS)])


def rows(*shape, dtype=torch.float32, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def narrow(sums, dtype):
    """Float32 in the dtype of rows, as torch's kernel for the CPU rounds it to bfloat16: halves away from zero."""
    if dtype == torch.float32:
        return sums
    return ((sums.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32).to(dtype)


def by_hand(copies, chosen, run):
    """Each row's sum of the sums of its runs, addition by addition, from copies in order of their numbers."""
    places = {(row, number): place for place, (number, row) in enumerate(
        sorted((int(n), row) for row, own in enumerate(chosen) for n in own))}  # fmt: skip
    out = []
    for row, own in enumerate(chosen.tolist()):
        total = torch.zeros(copies.shape[1])
        for first in sorted({number // run for number in own}):
            part = torch.zeros(copies.shape[1])
            for number in own:
                if number // run == first:
                    part = part + copies[places[row, number]].float()
            total = total + narrow(part, copies.dtype).float()
        out.append(narrow(total, copies.dtype))
    return torch.stack(out)


CASES = [(times, run) for times in (1, 3, 6) for run in (1, 4, NUMBERS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("times", "run"), CASES)
def test_sums_are_made_run_by_run_in_order_of_the_numbers(times, run, dtype):
    chosen = numbers(times)
    copies, _ = RowCopies.of(chosen, run, min(times, NUMBERS // run))
    values = rows(ROWS * times, WIDTH, dtype=dtype)
    assert torch.equal(copies.up(values), by_hand(values, chosen, run))


@pytest.mark.parametrize(("times", "run"), CASES)
def test_each_is_the_gradient_of_the_other(times, run):
    chosen = numbers(times)
    copies, order = RowCopies.of(chosen, run, min(times, NUMBERS // run))
    x, many = rows(ROWS, WIDTH).requires_grad_(), rows(ROWS * times, WIDTH, seed=2).requires_grad_()
    assert torch.equal(copied(x, copies), x.repeat_interleave(times, 0)[order])
    (of_x,) = torch.autograd.grad(copied(x, copies), x, many)
    assert torch.equal(of_x, copies.up(many))
    (of_many,) = torch.autograd.grad(summed(many, copies), many, x)
    assert torch.equal(of_many, copies.down(x))


def test_orders_are_kept_and_no_rows():
    copies, _ = RowCopies.of(numbers(3), 4, 3)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        summed(copied(rows(ROWS, WIDTH).requires_grad_(), copies), copies)
    assert kept
    assert {tensor.dtype for tensor in kept} == {torch.int64}


def test_a_sum_makes_no_copy_of_the_rows():
    (copies, _), many = RowCopies.of(numbers(6), 1, 6), rows(ROWS * 6, WIDTH)
    with LiveBytes() as live:
        copies.up(many)
    assert live.peak <= 0.5 * many.nbytes


def test_a_sum_of_nothing_is_zero():
    nothing, starts = torch.empty(0, WIDTH), torch.zeros(3, dtype=torch.int64)
    assert torch.equal(sums(nothing, torch.empty(0, dtype=torch.int64), starts), torch.zeros(3, WIDTH))
    some = sums(torch.ones(2, WIDTH), torch.tensor([0, 1]), torch.tensor([0, 1, 1]))
    assert some[:, 0].tolist() == [1.0, 0.0, 1.0]


def test_places_of_set_elements_are_found_without_reading_them():
    mask = torch.tensor([[False, True, True], [False, False, True]])
    assert set_places(mask, 3).tolist() == [1, 2, 5]
    assert set_places(mask & False, 0).tolist() == []
    assert set_places(mask.to("meta"), 3).shape == (3,)


def test_numbers_made_under_fake_tensors_are_not_kept_for_real_ones():
    chosen = numbers(2, seed=3)[:5]  # a shape of no other test
    for before, mode in ((False, FakeTensorMode()), (True, FakeTensorMode())):
        if before:
            real = RowCopies.of(chosen, 1, 1)[0]
            assert type(real.places) is torch.Tensor
        with mode:
            fake = RowCopies.of(mode.from_tensor(chosen), 1, 1)[0]
            assert fake.up(torch.ones(10, 4)).shape == (5, 4)
    assert torch.equal(real.up(torch.ones(10, 4)), torch.full((5, 4), 2.0))
