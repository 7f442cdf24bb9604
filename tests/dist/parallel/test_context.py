"""Attention of ranks that share sequences: one process's numbers, the plan's bytes, and no more kept than a rank's own.

One set of four processes runs all cases; as two pairs where cp is 2.
"""

from __future__ import annotations

from functools import partial
from itertools import cycle, product
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from live_memory import LiveBytes, kept_by
from pairwise import pairwise
from ranks import run_ranks
from sent_bytes import SentBytes

from ppctl.config.schema import ModelConfig
from ppctl.cost.context_parallelism import context_traffic, exchanging, live_more
from ppctl.cost.layer_parts import attention_parts
from ppctl.cost.setting import Setting
from ppctl.model.attention import attend
from ppctl.model.block_attention import FLASH_ON_CPU, UNFUSED, BlockAttention
from ppctl.model.kernels import ON_CPU
from ppctl.model.packing import Documents
from ppctl.parallel.context import RingAttention, context_attention
from ppctl.sequence_halves import Halves, Lengths
from ppctl.tensors.tensor_halves import own_halves, own_positions, to_ranks, to_whole
from ppctl.topology import ParallelSizes, levels

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


def by_document(function):
    """Of a kernel's forward or backward: one that takes all documents of a causal block at once."""

    def each(*args):
        at = int(len(args) > 1)  # a backward's block comes after the gradient
        *heads, scale, causal, documents = args[at]
        if documents is None:
            return function(*args)
        rows = []
        for row, lengths in enumerate(documents):
            tensors = (*args[:at], *heads, *args[at + 1 :])
            cut = zip(*(tensor[row : row + 1].split(lengths, 2) for tensor in tensors), strict=True)
            alone = [function(*part[:at], (*part[at : at + 3], scale, causal, None), *part[at + 3 :]) for part in cut]
            rows.append([torch.cat(found, 2) for found in zip(*alone, strict=True)])
        return [torch.cat(found) for found in zip(*rows, strict=True)]

    return each


JOINING = BlockAttention("joining", by_document(FLASH_ON_CPU.forward), by_document(FLASH_ON_CPU.backward), True)
KERNELS = {"flash": FLASH_ON_CPU, "unfused": UNFUSED, "joining": JOINING}
"""`joining` is called as CUDA's flash attention is."""


class Case(NamedTuple):
    kind: str
    cp: int
    shape: str
    packed: str
    kernel: str = "flash"
    dtype: str = "float64"
    scale: float | None = None


GRID = [Case(*way, *row) for way, row in product(WAYS, product(SHAPES, PACKED, KERNELS, ("float64",), (None, 0.1)))]


def as_rows(cases: list[Case]) -> list[tuple]:
    """With the way as one axis."""
    return [(case[:2], *case[2:]) for case in cases]


LIVING = [Case(*way, shape, "rows") for way, shape in product(WAYS, ("grouped", "fewer groups than ranks"))]
CASES = [
    *(Case(*way, *row) for way, *row in pairwise(as_rows(GRID), as_rows(LIVING))),
    *(Case(*way, shape, "documents", dtype="float32") for way, shape in zip(WAYS, cycle(("grouped", "latent")))),
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
    lived: int
    """The most bytes that lived at once while the backward ran, made by it."""


def run(case: Case, groups: Groups) -> Run:
    halves = Halves(dist.get_rank() % case.cp, case.cp, S)
    *inputs, gradient = (own_halves(whole, halves, 2) for whole in drawn(case))
    way = way_of(case.kind, case.cp, KERNELS[case.kernel], groups)
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    with SentBytes() as counted:
        kept, out = kept_by(lambda: way(q, k, v, documents_of(case.packed), case.scale))
        forward = counted.total
        with LiveBytes() as live:
            gradients = torch.autograd.grad(out, (q, k, v), gradient)
    calls, backward = dict(counted.calls), counted.total - forward
    return Run([out.detach(), *gradients], forward, backward, calls, kept, live.peak)


def run_all(cases: list[Case]) -> list[Run]:
    groups = make_groups()
    return [run(case, groups) for case in cases]


def runs_of(cases: list[Case]) -> dict[Case, list[Run]]:
    """Of each case, what the ranks of its first group have."""
    found = run_ranks(run_all, 4, cases, timeout=600.0)
    return {case: [rank[number] for rank in found[: case.cp]] for number, case in enumerate(cases)}


@pytest.fixture(scope="module")
def runs() -> dict[Case, list[Run]]:
    return runs_of(CASES)


def hold_to_one_process(found: dict[Case, list[Run]]) -> None:
    for case, ranks in found.items():
        tolerance = 1e-12 if case.dtype == "float64" else 1e-5
        for name, wanted, *parts in zip("oqkv", one_process(case), *(rank.tensors for rank in ranks), strict=True):
            got = to_whole(torch.stack(parts), 2)
            assert got.dtype == wanted.dtype
            assert (got - wanted).abs().max() <= tolerance * wanted.abs().max(), (case, name)


def test_every_way_has_the_numbers_of_one_process(runs: dict[Case, list[Run]]) -> None:
    hold_to_one_process(runs)


@pytest.mark.whole
def test_every_combination_has_the_numbers_of_one_process() -> None:
    plain = (case for case in GRID if case.kernel == "flash" and case.scale is None)
    hold_to_one_process(runs_of([case for case in plain if case not in CASES]))


def model_of(shape: str) -> ModelConfig:
    """A model with these heads."""
    heads, groups, width, values = SHAPES[shape]
    if width == values:
        return ModelConfig(num_attention_heads=heads, num_query_groups=groups, kv_channels=width)
    assert heads == groups, "two widths are latent attention's"
    latent = dict(multi_latent_attention=True, qk_head_dim=width - 4, qk_pos_emb_head_dim=4, v_head_dim=values)
    return ModelConfig(num_attention_heads=heads, **latent)


def setting_of(case: Case) -> Setting:
    element = getattr(torch, case.dtype).itemsize
    over = ParallelSizes(case.cp, cp=case.cp, edp=case.cp)
    return Setting(B, S, element, over, packed=case.packed != "rows", levels=(2, 2) if case.kind == "a2a+p2p" else None)


PRICED = [case for case in CASES if case.shape != "wide values"]


def test_bytes_sent_are_the_plans(runs: dict[Case, list[Run]]) -> None:
    """Exactly, forward and backward, on every rank, whatever its documents are."""
    for case in PRICED:
        setting = setting_of(case)
        size = setting.tokens * setting.element
        priced = context_traffic(model_of(case.shape), case.kind, size, setting.sizes, setting.levels)
        keys = priced.ring + priced.gathered  # in the backward again, and their gradients
        for rank in runs[case]:
            assert (rank.forward, rank.backward) == (keys + priced.heads, 2 * keys + priced.heads), case


def test_every_rank_makes_the_same_exchanges(runs: dict[Case, list[Run]]) -> None:
    """Whether it has keys to see or not, so that no rank waits for one that does not come."""
    expected = {
        ("p2p", 2): {"send": 3}, ("p2p", 4): {"send": 9},
        ("a2a", 2): {"alltoall_base": 4}, ("a2a", 4): {"alltoall_base": 4},
        ("a2a+p2p", 4): {"alltoall_base": 4, "send": 3},
    }  # fmt: skip
    for case, ranks in runs.items():
        gathers = {"allgather_base": 2, "reduce_scatter_base": 1}
        assert all(rank.calls == expected.get(case[:2], gathers) for rank in ranks), case


def test_what_is_kept_is_the_plans(runs: dict[Case, list[Run]]) -> None:
    """A rank's own queries, keys, values and result, and a number for each head and token; never other ranks' keys.

    What exchanges heads keeps its result and repeated keys beside the result that the next product reads.
    """
    compared = [case for case in PRICED if case.kind != "a2a" or case.shape != "latent"]  # no fused kernel on the CPU
    for case in compared:
        setting, model = setting_of(case), model_of(case.shape)
        heads, groups, width, values = SHAPES[case.shape]
        parts = attention_parts(model, setting, case.kind)
        beside = sum(part.size for part in parts if part.module == "core_attn")
        plain = (heads + groups) * (width + values) * setting.element
        if exchanging(case.kind, setting.sizes, setting.levels) > 1:
            plain -= heads * values * setting.element  # the result that the next product reads
        assert {rank.kept for rank in runs[case]} == {setting.tokens * (plain + beside)}, case
    assert len(compared) > 20


def test_what_lives_in_a_backward_is_the_plans(runs: dict[Case, list[Run]]) -> None:
    """Within 3 % on the rank that has the most."""
    found = {}
    for case in LIVING:
        setting, model = setting_of(case), model_of(case.shape)
        heads, groups, width, values = SHAPES[case.shape]
        more = live_more(model, case.kind, setting.sizes, setting.levels, wide=1.0)
        planned = setting.tokens * setting.element * (heads * width + groups * (width + values) + more)
        found[case] = max(rank.lived for rank in runs[case]) / planned
    off = {tuple(case): ratio for case, ratio in found.items() if abs(ratio - 1) > 0.03}
    assert not off, "\n".join(map(str, off.items()))


def test_tokens_are_taken_and_put_together_in_order() -> None:
    whole, ranks = torch.arange(3 * 16 * 2).view(3, 16, 2), []
    for rank in range(4):
        halves = Halves(rank, 4, 16)
        positions = own_positions(halves)
        assert positions.tolist() == [2 * rank, 2 * rank + 1, 14 - 2 * rank, 15 - 2 * rank]
        ranks.append(own_halves(whole, halves, 1))
        assert torch.equal(ranks[-1], whole[:, positions])
    assert torch.equal(to_whole(torch.stack(ranks), 1), whole)
    assert torch.equal(to_ranks(whole, 4, 1), torch.stack(ranks))
    assert torch.equal(to_whole(torch.stack([own.mT for own in ranks]), -1), whole.mT)


def rounded() -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's result in bfloat16 where the heads are so, and under autocast of float32 heads."""
    halves = Halves(dist.get_rank(), 4, S)
    q, k, v, _ = (own_halves(whole, halves, 2) for whole in drawn(Case("p2p", 4, "grouped", "rows", dtype="float32")))
    way = RingAttention(dist.group.WORLD, FLASH_ON_CPU)
    with torch.autocast("cpu", torch.bfloat16):
        cast = way(q, k, v)
    return way(*(heads.bfloat16() for heads in (q, k, v))), cast


def test_blocks_in_16_bits_are_merged_in_float32() -> None:
    """The error is that of 16 bits' own rounding, once for each of up to four blocks and once for their sum."""
    found = run_ranks(rounded, 4)
    q, k, v, _ = drawn(Case("p2p", 4, "grouped", "rows", dtype="float32"))
    narrow = [heads.bfloat16() for heads in (q, k, v)]
    alone = attend(*narrow, None, None, kernels=ON_CPU)
    exact = attend(*(heads.double() for heads in narrow), None, None, kernels=ON_CPU)
    merged = to_whole(torch.stack([one for one, _ in found]), 2)
    assert merged.dtype == torch.bfloat16
    assert (merged - exact).abs().mean() <= 1.25 * (alone - exact).abs().mean()
    assert all(torch.equal(*pair) for pair in found), "autocast casts heads as it does for torch's attention"
