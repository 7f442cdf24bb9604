"""Attention of ranks that share sequences: one process's numbers, the plan's bytes, and no more kept than a rank's own.

One set of four processes runs all cases; as two pairs where cp is 2.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from live_memory import kept_by
from ranks import run_ranks
from sent_bytes import SentBytes

from ppctl.model.block_attention import FLASH_ON_CPU, UNFUSED, BlockAttention
from ppctl.model.core_attention import attend
from ppctl.model.kernels import ON_CPU
from ppctl.model.packing import Documents
from ppctl.parallel.context import (
    context_attention,
    own_halves,
    to_whole,
)
from ppctl.sequence_halves import Halves, Lengths
from ppctl.topology import levels

S, B = 32, 2
WAYS = [(kind, cp) for kind in ("p2p", "all_gather", "a2a") for cp in (2, 4)] + [("a2a+p2p", 4)]
PACKED: dict[str, Lengths | None] = {
    "rows": None,
    "documents": ((5, 20, 7), (1, 1, 2, 4, 8, 16)),
    "equal rows": ((3, 11, 18),) * 2,
    "ends of chunks": ((4, 4, 8, 16), (12, 20)),
    "single tokens": ((1,) * 32, (31, 1)),
}


class Heads(NamedTuple):
    heads: int
    groups: int
    width: int
    values: int


SHAPES = {
    "grouped": Heads(8, 4, 8, 8),
    "fewer groups than ranks": Heads(4, 1, 8, 8),
    "groups that ranks do not divide": Heads(12, 3, 6, 6),
    "latent": Heads(4, 4, 12, 8),
    "wide values": Heads(4, 2, 6, 10),
}
KERNELS = {"flash": FLASH_ON_CPU, "unfused": UNFUSED}


class Case(NamedTuple):
    kind: str
    cp: int
    shape: str
    packed: str
    kernel: str = "flash"
    dtype: str = "float64"
    scale: float | None = None


CASES = [
    *(Case(*way, shape, packed) for way, shape, packed in product(WAYS, SHAPES, PACKED)),
    *(Case(*way, shape, "documents", "unfused") for way, shape in product(WAYS[:4], SHAPES)),
    *(Case(*way, "latent", packed, scale=0.1) for way, packed in product(WAYS, ("rows", "documents"))),
    *(Case(*way, shape, "documents", dtype="float32") for way, shape in product(WAYS, ("grouped", "latent"))),
]


def drawn(case: Case) -> list[torch.Tensor]:
    """q, k, v of whole sequences, and the gradient of the result."""
    heads, groups, width, values = SHAPES[case.shape]
    torch.manual_seed(7)
    sizes = (heads, width), (groups, width), (groups, values), (heads, values)
    return [torch.randn(B, number, S, wide, dtype=getattr(torch, case.dtype)) for number, wide in sizes]


def one_process(case: Case) -> list[torch.Tensor]:
    """The result and the gradients of q, k and v, by a softmax over all scores."""
    *inputs, gradient = drawn(case)
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    repeats = q.shape[1] // k.shape[1]
    rows = PACKED[case.packed] or ((S,),) * B
    seen = torch.stack([torch.block_diag(*(torch.ones(n, n) for n in row)).tril().bool() for row in rows])
    scores = q @ k.repeat_interleave(repeats, 1).mT * (case.scale or q.shape[-1] ** -0.5)
    shares = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = shares @ v.repeat_interleave(repeats, 1)
    out.backward(gradient)
    return [out.detach(), *(tensor.grad for tensor in (q, k, v))]


class Groups(NamedTuple):
    pair: dist.ProcessGroup
    inner: dist.ProcessGroup
    outer: dist.ProcessGroup


def make_groups() -> Groups:
    inner, outer = levels(range(4), 2)
    own = {}
    for name, groups in (("pair", inner), ("inner", inner), ("outer", outer)):
        for ranks in groups:
            group = dist.new_group(list(ranks))
            if dist.get_rank() in ranks:
                own[name] = group
    return Groups(**own)


def way_of(kind: str, cp: int, kernel: BlockAttention, groups: Groups):
    group = groups.pair if cp == 2 else dist.group.WORLD
    return context_attention(kind, group, kernel, partial(attend, kernels=ON_CPU), groups[1:])


def documents_of(packed: str) -> Documents | None:
    return None if PACKED[packed] is None else Documents(PACKED[packed])


class Run(NamedTuple):
    tensors: list[torch.Tensor]
    """This rank's result and gradients."""
    forward: int
    backward: int
    """Bytes that it sent."""
    calls: dict[str, int]
    kept: int
    """Bytes in storages that autograd kept."""


def run(case: Case, groups: Groups) -> Run:
    halves = Halves(dist.get_rank() % case.cp, case.cp, S)
    *inputs, gradient = (own_halves(whole, halves, 2) for whole in drawn(case))
    way = way_of(case.kind, case.cp, KERNELS[case.kernel], groups)
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    with SentBytes() as counted:
        kept, out = kept_by(lambda: way(q, k, v, documents_of(case.packed), case.scale))
        forward = counted.total
        out.backward(gradient)
    tensors = [out.detach(), *(tensor.grad for tensor in (q, k, v))]
    return Run(tensors, forward, counted.total - forward, dict(counted.calls), kept)


def run_all(cases: list[Case]) -> list[Run]:
    groups = make_groups()
    return [run(case, groups) for case in cases]


@pytest.fixture(scope="module")
def runs() -> dict[Case, list[Run]]:
    """Of each case, what the ranks of its first group have."""
    found = run_ranks(run_all, 4, CASES)
    return {case: [rank[number] for rank in found[: case.cp]] for number, case in enumerate(CASES)}


def hold_to(case: Case, ranks: list[Run], tolerance: float) -> None:
    for name, wanted, *parts in zip("oqkv", one_process(case), *(rank.tensors for rank in ranks), strict=True):
        got = to_whole(torch.stack(parts), 2)
        assert got.dtype == wanted.dtype
        assert (got - wanted).abs().max() <= tolerance * wanted.abs().max(), (case, name)


def test_every_way_has_the_numbers_of_one_process(runs: dict[Case, list[Run]]) -> None:
    for case, ranks in runs.items():
        hold_to(case, ranks, 1e-12 if case.dtype == "float64" else 1e-5)
