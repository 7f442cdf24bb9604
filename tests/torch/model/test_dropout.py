"""Draws are a pure function of seed, step, sample, name and global position; and what dropout does with them."""

from __future__ import annotations

import pytest
import torch

from ppctl.geometry import layers
from ppctl.model.attention import core_attention
from ppctl.model.dropout import Draws, Dropout, draw, name_key, row_keys, sample_key
from ppctl.model.dropped_attention import Dropped, kept_probabilities
from ppctl.model.kernels import ON_CPU
from ppctl.model.packing import Documents

KEYS = torch.tensor([sample_key(1, 2, sample) for sample in range(3)])


def named(name, p=0.25):
    found = Dropout(p)
    found.key = torch.tensor(name_key(name))
    return found


def in_whole_numbers(key, row, column):
    """The draw in Python's integers."""
    z = (key + row * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    z ^= z >> 31
    x = column ^ (z % 2**32)
    x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
    x = (x + (z >> 32)) % 2**32
    x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
    x ^= x >> 16
    return x - 2**32 if x >= 2**31 else x


@pytest.mark.parametrize("columns", [1, 7, 8, 37, 64])
def test_draws_are_the_ones_of_whole_numbers_at_every_length_of_a_row(columns):
    """Products that leave 32 or 64 bits wrap around in vectors and behind them, also of negative numbers."""
    rows = torch.tensor([0, 1, 5 << 32 | 3, 2**40 + 9])
    found = draw(row_keys(KEYS[:, None], rows), torch.arange(columns, dtype=torch.int32))
    wanted = [[[in_whole_numbers(k, r, c) for c in range(columns)] for r in rows.tolist()] for k in KEYS.tolist()]
    assert found.tolist() == wanted


def test_a_part_of_rows_samples_or_heads_draws_what_the_whole_does():
    x = torch.ones(3, 10, 16)
    whole = named("layers.0.after_ffn")(x, Draws(KEYS))
    part = named("layers.0.after_ffn")(x[1:2, 4:7], Draws(KEYS[1:2], torch.arange(4, 7)))
    assert torch.equal(part, whole[1:2, 4:7])
    probabilities = kept_probabilities(Dropped(KEYS, 0.5), 4, torch.arange(9), torch.arange(9))
    some = kept_probabilities(Dropped(KEYS, 0.5, first_head=2), 1, torch.tensor([1, 5]), torch.arange(3, 9))
    assert torch.equal(some, probabilities[:, 2:3, [1, 5], 3:])


@pytest.mark.parametrize(
    "other", [(0, 2, 0, "a"), (1, 3, 0, "a"), (1, 2, 1, "a"), (1, 2, 0, "b")], ids=["seed", "step", "sample", "name"]
)
def test_another_seed_step_sample_or_name_is_another_draw(other):
    x = torch.ones(1, 64, 64)

    def drawn(seed, step, sample, name):
        return named(name, 0.5)(x, Draws(torch.tensor([sample_key(seed, step, sample)]))) > 0

    same = (drawn(1, 2, 0, "a") == drawn(*other)).double().mean()
    assert same == pytest.approx(0.5, abs=0.03)
    assert torch.equal(drawn(1, 2, 0, "a"), drawn(1, 2, 0, "a"))


def test_draws_are_uniform_and_neighbours_independent():
    """4 x 10^6 draws in 256 classes; then each beside its neighbours in the row, the column and the samples."""
    samples = torch.tensor([sample_key(0, 0, sample) for sample in range(16)])
    numbers = draw(row_keys(samples[:, None], torch.arange(256)), torch.arange(1024, dtype=torch.int32))
    for shift in (24, 8, 0):
        counts = torch.bincount(((numbers >> shift) & 255).flatten(), minlength=256).double()
        expected = numbers.numel() / 256
        chi = ((counts - expected) ** 2 / expected).sum()
        assert 255 - 5 * 510**0.5 < chi < 255 + 5 * 510**0.5, shift
    x = numbers.double() / 2**31
    assert x.mean().abs() < 5 / (3 * numbers.numel()) ** 0.5
    for dim in range(3):
        for step in (1, 2):
            beside = (x.narrow(dim, step, x.shape[dim] - step) * x.narrow(dim, 0, x.shape[dim] - step)).mean() * 3
            assert beside.abs() < 5 / numbers.numel() ** 0.5, (dim, step)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.999])
def test_the_share_that_is_dropped_is_p_and_the_rest_keeps_the_mean(p):
    x = torch.ones(3, 128, 512, dtype=torch.float64, requires_grad=True)
    out = named("a", p)(x, Draws(KEYS))
    share, deviation = (out == 0).double().mean().item(), (p * (1 - p) / x.numel()) ** 0.5
    assert share == pytest.approx(p, abs=4 * deviation)
    assert out.unique().tolist() == [0.0, pytest.approx(1 / (1 - p), rel=1e-15)]
    out.sum().backward()
    assert torch.equal(x.grad, out.detach()), "the backward drops the same elements"


def test_nothing_is_kept_but_keys_and_positions():
    x = torch.randn(3, 64, 96, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()), lambda _: None):
        named("a")(x, Draws(KEYS))
    assert sorted(saved) == [3, 64]


def test_how_many_are_drawn_at_once_changes_nothing(monkeypatch):
    x = torch.randn(3, 10, 16)
    whole = named("a")(x, Draws(KEYS))
    monkeypatch.setattr(layers, "DRAWN_ON_CPU", 50)
    assert torch.equal(named("a")(x, Draws(KEYS)), whole)


def test_without_draws_or_share_a_state_stays_what_it_is():
    x = torch.randn(2, 3, 4)
    assert named("a")(x, None) is x
    assert named("a", 0.0)(x, Draws(KEYS[:2])) is x


def heads(groups, s=12, width=8, values=8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((3, 4, s, width), (3, groups, s, width), (3, groups, s, values))
    return [torch.randn(shape, generator=generator, dtype=dtype, requires_grad=True) for shape in shapes]


def plainly(q, k, v, dropped, scale=None):
    """Attention step by step, with the whole [b, heads, s, s]."""
    s, rest = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (each.repeat_interleave(rest, dim=1) for each in (k, v))
    scores = q @ k.transpose(2, 3) * (q.shape[-1] ** -0.5 if scale is None else scale)
    at = torch.arange(s)
    shares = scores.masked_fill(at > at[:, None], -torch.inf).softmax(-1)
    keep = kept_probabilities(dropped, q.shape[1], at, at)
    return ((shares * keep / (1 - dropped.p)) @ v).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("at_once", [2**24, 3 * 4 * 12 * 5, 1], ids=["at once", "five queries", "one by one"])
def test_attention_in_blocks_is_attention_with_those_probabilities_dropped(groups, at_once, monkeypatch):
    monkeypatch.setattr(layers, "SCORES", at_once)
    dropped, tensors = Dropped(KEYS, 0.4), heads(groups, values=6)
    found, wanted = core_attention(*tensors, ON_CPU, scale=0.3, dropped=dropped), plainly(*tensors, dropped, 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)
    weight = torch.randn_like(found)
    pairs = zip(*(torch.autograd.grad((out * weight).sum(), tensors) for out in (found, wanted)), strict=True)
    for own, other in pairs:
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12)


def test_attention_keeps_queries_keys_and_values_alone():
    tensors, saved = heads(2), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()), lambda _: None):
        core_attention(*tensors, ON_CPU, dropped=Dropped(KEYS, 0.4))
    assert set(saved) == {each.data_ptr() for each in (*tensors, KEYS)}


def test_a_document_draws_by_its_place_in_the_row():
    """Of rows of several documents the queries and keys have the positions of the row, not of the document."""
    dropped, tensors = Dropped(KEYS, 0.4), heads(2)
    documents = Documents(((12,), (5, 7), (1, 11)))
    found = core_attention(*tensors, ON_CPU, documents, dropped=dropped)
    alone = plainly(*tensors, dropped)
    torch.testing.assert_close(found[0], alone[0])
    torch.testing.assert_close(found[1, :5], alone[1, :5])
    q, k, v = (each[1:2, :, 5:] for each in tensors)
    at = torch.arange(7)
    shares = q @ k.repeat_interleave(2, 1).transpose(2, 3) * 8**-0.5
    shares = shares.masked_fill(at > at[:, None], -torch.inf).softmax(-1)
    keep = kept_probabilities(Dropped(KEYS[1:2], 0.4), 4, at + 5, at + 5)
    wanted = ((shares * keep / 0.6) @ v.repeat_interleave(2, 1)).transpose(1, 2).flatten(2)
    torch.testing.assert_close(found[1, 5:], wanted[0])


def test_autocast_changes_attentions_dtype_and_not_its_backward():
    tensors = heads(2, dtype=torch.float32)
    dropped = Dropped(KEYS, 0.4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = core_attention(*tensors, ON_CPU, dropped=dropped)
    assert found.dtype == torch.bfloat16
    found.float().square().sum().backward()
    wanted = core_attention(*(each.detach() for each in tensors), ON_CPU, dropped=dropped)
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.05)
    assert all(each.grad.dtype == torch.float32 for each in tensors)
