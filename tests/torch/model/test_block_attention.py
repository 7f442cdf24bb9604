"""Attention by blocks: each kernel has the numbers of plain products; a GPU's, as its contract is, by a stand-in."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ppctl.model import block_attention
from ppctl.model.block_attention import FLASH_ON_CPU, FLASH_ON_CUDA, UNFUSED, BlockAttention

SCALE = 0.3


def heads(s: int, t: int, width: int, values: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The result's gradient, q, k and v of two rows, 4 heads and 2 groups; strided, as slices of sequences are."""
    torch.manual_seed(3)
    made = [
        torch.randn(2, length + 3, number, wide, dtype=torch.float64)[:, 2:-1].transpose(1, 2)
        for length, number, wide in ((s, 4, values), (s, 4, width), (t, 2, width), (t, 2, values))
    ]
    return made[0], made[1], made[2], made[3]


def by_autograd(gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> list[Tensor]:
    """Result, log-sums, and gradients of q, k and v."""
    q, k, v = (each.detach().clone().requires_grad_() for each in (q, k, v))
    scores = (q @ k.repeat_interleave(2, 1).mT * SCALE).masked_fill(hidden, -torch.inf)
    out = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    out.backward(gradient)
    assert q.grad is not None and k.grad is not None and v.grad is not None
    return [out.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad]


class FlashOnCuda(SimpleNamespace):
    """ATen's two functions by their documents and their kernels' checks: [b, s, heads, width], or with bounds
    [tokens, heads, width] and log-sums [heads, tokens]."""

    def _flash_attention_forward(
        self, q, k, v, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, debug, *, scale
    ):
        self.check(q, k, v, bounds_q, bounds_k, longest_q, longest_k)
        assert dropout == 0.0 and not debug
        out, log_sums = q.new_empty(q.shape), q.new_empty(self.shape(q))
        for own, seen in self.documents(q, k, bounds_q, bounds_k):
            block = self.heads(q, own), self.heads(k, seen), self.heads(v, seen), scale, causal, None
            found = UNFUSED.forward(block)
            self.heads(out, own).copy_(found[0])
            self.rows(log_sums, own).copy_(found[1])
        return out, log_sums, None, None, None

    def _flash_attention_backward(
        self, gradient, q, k, v, out, log_sums, bounds_q, bounds_k, longest_q, longest_k, dropout, causal, state,
        unused, *, scale,
    ):  # fmt: skip
        self.check(q, k, v, bounds_q, bounds_k, longest_q, longest_k)
        assert gradient.shape == out.shape == q.shape and log_sums.shape == self.shape(q) and log_sums.is_contiguous()
        assert state.dtype == torch.uint64 and unused.numel() == 0 and dropout == 0.0
        made = [torch.empty_like(each) for each in (q, k, v)]
        for own, seen in self.documents(q, k, bounds_q, bounds_k):
            block = self.heads(q, own), self.heads(k, seen), self.heads(v, seen), scale, causal, None
            result = self.heads(out, own), self.rows(log_sums, own)
            found = UNFUSED.backward(self.heads(gradient, own), block, *result)
            for each, place, one in zip(made, (own, seen, seen), found, strict=True):
                self.heads(each, place).copy_(one)
        return tuple(made)

    def check(self, q, k, v, bounds_q, bounds_k, longest_q, longest_k):
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0, "one width, of whole 16 bytes"
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        assert q.dim() == (4 if bounds_q is None else 3)
        if bounds_q is not None:
            assert bounds_q.dtype == torch.int32 and bounds_q[-1] == len(q) and bounds_k[-1] == len(k)
            assert longest_q == max(bounds_q.diff()) and longest_k == max(bounds_k.diff())
        else:
            assert (longest_q, longest_k) == (q.shape[1], k.shape[1])

    def shape(self, q):
        return (q.shape[1], q.shape[0]) if q.dim() == 3 else (q.shape[0], q.shape[2], q.shape[1])

    def documents(self, q, k, bounds_q, bounds_k):
        if bounds_q is None:
            return [(None, None)]
        return zip(*([slice(*ends) for ends in pairwise(each.tolist())] for each in (bounds_q, bounds_k)), strict=True)

    def heads(self, tokens, place):
        return tokens.transpose(1, 2) if place is None else tokens[place].transpose(0, 1)[None]

    def rows(self, log_sums, place):
        return log_sums if place is None else log_sums[:, place][None]


@pytest.fixture(params=["unfused", "flash on the CPU", "flash on CUDA"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BlockAttention:
    if request.param == "flash on CUDA":
        monkeypatch.setattr(block_attention, "_aten", FlashOnCuda())
        return FLASH_ON_CUDA
    return UNFUSED if request.param == "unfused" else FLASH_ON_CPU


def hold(kernel: BlockAttention, sizes: tuple[int, int, int, int], causal: bool, documents=None, hidden=None) -> None:
    gradient, *inputs = heads(*sizes)
    wanted = by_autograd(gradient, *inputs, torch.zeros(sizes[:2], dtype=torch.bool) if hidden is None else hidden)
    block = (*inputs, SCALE, causal, documents)
    out, log_sums = kernel.forward(block)
    found = kernel.backward(gradient, block, out, log_sums)
    for got, expected in zip((out, log_sums, *found), wanted, strict=True):
        assert got.shape == expected.shape
        assert (got - expected).abs().max() <= 1e-13 * max(1, expected.abs().max())


@pytest.mark.parametrize(("width", "values"), [(8, 8), (12, 8), (6, 10)])
def test_a_block_has_the_numbers_of_plain_products(kernel: BlockAttention, width: int, values: int) -> None:
    hold(kernel, (5, 9, width, values), causal=False)
    hold(kernel, (7, 7, width, values), causal=True, hidden=torch.ones(7, 7).triu(1).bool())


def test_a_gpu_computes_all_documents_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "_aten", FlashOnCuda())
    documents = ((3, 4), (1, 6))
    seen = torch.stack([torch.block_diag(*(torch.ones(n, n) for n in row)).tril() for row in documents])
    hold(FLASH_ON_CUDA, (7, 7, 12, 8), True, documents, ~seen.bool()[:, None])
    assert FLASH_ON_CUDA.joins_documents and not FLASH_ON_CPU.joins_documents


def test_the_backward_of_a_block_follows_from_the_merged_result(kernel: BlockAttention) -> None:
    """Of keys in two blocks: the gradients of both together."""
    gradient, q, k, v = heads(5, 9, 8, 8)
    wanted = by_autograd(gradient, q, k, v, torch.zeros(5, 9, dtype=torch.bool))
    cut = (slice(0, 4), slice(4, 9))
    for place in cut:
        block = (q, k[:, :, place], v[:, :, place], SCALE, False, None)
        _, of_k, of_v = kernel.backward(gradient, block, *wanted[:2])
        assert (of_k - wanted[3][:, :, place]).abs().max() < 1e-13
        assert (of_v - wanted[4][:, :, place]).abs().max() < 1e-13
