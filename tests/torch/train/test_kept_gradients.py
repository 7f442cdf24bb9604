"""The fingerprint of a message: what it says, and how little it takes beside the message."""

import pytest
import torch
from live_memory import LiveBytes

from ppctl.train.recordings import fingerprint
from ppctl.train.replica_check import PIECE

MIB = 2**20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_fingerprint_takes_little_beside_its_message_and_leaves_it_as_it_is(dtype):
    message = torch.randn(3, 2 * PIECE + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = message.clone()
    with LiveBytes() as live:
        squares, bits = fingerprint(message)
    assert live.peak < 33 * MIB, live.peak / MIB
    assert torch.equal(message, before)
    assert squares.item() == pytest.approx(before.double().square().sum().item(), rel=1e-12)
    whole = before.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[before.element_size()])
    assert bits.item() == whole.sum(dtype=torch.int64).item()


def test_a_message_that_is_a_view_has_the_fingerprint_of_its_copy():
    message = torch.arange(24.0).view(4, 6).t()
    assert [float(each) for each in fingerprint(message)] == [float(each) for each in fingerprint(message.clone())]


def test_an_exchange_with_another_number_shows():
    assert float(fingerprint(torch.tensor([1.0, 2.0]))[1]) != float(fingerprint(torch.tensor([1.0, 2.5]))[1])
