"""Keys and values that travel between emulated devices with NCCL's manners.

Messages move when both ends have come, hosts run ahead, and memory that nobody holds is used again at once.
"""

from __future__ import annotations

import pytest
import torch
from emulated_hosts import hand_over
from emulated_nccl import Backend, Dist
from emulated_world import World
from torch import Tensor

from ppctl.comm import groups
from ppctl.model.block_attention import UNFUSED
from ppctl.model.packing import Documents
from ppctl.parallel import all_to_all, context
from ppctl.parallel.context import Attend, GatherAttention, HeadExchange, RingAttention
from ppctl.sequence_halves import Halves, Lengths
from ppctl.tensors.tensor_halves import own_halves, to_whole

B, HEADS, S, WIDTH = 2, 4, 32, 2
"""With four ranks, scores of a block are as large as keys and values: what is freed too early is used by them."""
PACKED: dict[str, Lengths | None] = {"rows": None, "documents": ((5, 20, 7), (1, 31))}


def by_documents(
    q: Tensor, k: Tensor, v: Tensor, documents: Documents | None, scale: float | None, drops: None = None
) -> Tensor:
    """An `Attend` to whole sequences, by a softmax over all scores."""
    rows = ((S,),) * B if documents is None else documents.lengths
    seen = torch.stack([torch.block_diag(*(torch.ones(n, n) for n in row)).tril().bool() for row in rows])
    return (q @ k.mT * WIDTH**-0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


def way_of(kind: str, world: World, rank: int, ranks: int) -> Attend:
    group = Backend(world, rank, "cp", range(ranks))
    if kind == "p2p":
        return RingAttention(group, UNFUSED)
    if kind == "all_gather":
        return GatherAttention(group, UNFUSED)
    if kind == "a2a":
        return HeadExchange(group, by_documents)
    pair, across = rank // 2, rank % 2
    outer = Backend(world, rank, f"across {across}", [across, across + 2])
    return HeadExchange(Backend(world, rank, f"pair {pair}", [2 * pair, 2 * pair + 1]), RingAttention(outer, UNFUSED))


def drawn() -> list[Tensor]:
    """q, k, v and the gradient of the result, of whole sequences."""
    torch.manual_seed(5)
    return [torch.randn(B, HEADS, S, WIDTH, dtype=torch.float64) for _ in range(4)]


def with_gradients(way: Attend, tensors: list[Tensor], documents: Documents | None) -> tuple[Tensor, ...]:
    *inputs, gradient = tensors
    q, k, v = (tensor.detach().requires_grad_() for tensor in inputs)
    out = way(q, k, v, documents, None)
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), gradient))


@pytest.mark.parametrize(("kind", "ranks"), [("p2p", 2), ("p2p", 4), ("all_gather", 4), ("a2a", 2), ("a2a+p2p", 4)])
@pytest.mark.parametrize("packed", PACKED)
def test_every_order_of_hosts_and_devices_gives_the_same_numbers(kind: str, ranks: int, packed: str) -> None:
    lengths = PACKED[packed]
    documents = None if lengths is None else Documents(lengths)
    wholes = drawn()  # here: hosts that take turns would draw from one generator
    wanted = with_gradients(by_documents, wholes, documents)
    for seed in range(6):
        world = World(ranks, seed, eager=(0, 2**20)[seed % 2], record_streams=False)

        def host(rank: int, world: World = world) -> tuple[Tensor, ...]:
            halves = Halves(rank, ranks, S)
            own = [own_halves(whole, halves, 2) for whole in wholes]
            world.gpus[rank].drain("to have drawn")
            world.gpus[rank].waits.clear()
            found = with_gradients(way_of(kind, world, rank, ranks), own, documents)
            assert not world.gpus[rank].waits, "the host waited for its device"
            return found

        with pytest.MonkeyPatch.context() as patch:
            for module in (context, all_to_all):
                patch.setattr(module, "dist", Dist)
                patch.setattr(module, "hand_over", hand_over)
            patch.setattr(groups, "dist", Dist)
            patch.setattr(context, "all_gather", Dist.all_gather)
            patch.setattr(context, "reduce_scatter", Dist.reduce_scatter)
            found = world.run(host)
        for whole, parts in zip(wanted, zip(*found, strict=True), strict=True):
            torch.testing.assert_close(to_whole(torch.stack(parts), 2), whole, rtol=1e-11, atol=1e-12)
