"""Split products between emulated devices with NCCL's manners.

Exchanges move when all ranks have come, hosts run ahead, and memory that nobody holds is used again at once.
"""

from __future__ import annotations

import pytest
import torch
from emulated_nccl import Backend, Dist
from emulated_world import World
from torch import Tensor

from ppctl.model.linear import Projection, columns, from_columns
from ppctl.model.split import TensorSplit, enter
from ppctl.parallel import tensor
from ppctl.parallel.tensor import TensorParallel

B, S, H = 2, 8, 8


def block(x: Tensor, first: Tensor, second: Tensor, last: Tensor, split: TensorSplit | None) -> Tensor:
    """All exchanges of a block: two products of one input, columns of a whole state, and a sum over ranks."""
    projections = (Projection(weight, None, None) for weight in (first, second))
    left, right = columns(x, *projections, split=split)
    own = slice(None) if split is None else slice(split.rank * H // split.size, (split.rank + 1) * H // split.size)
    return from_columns(left * right * enter(x, split)[..., own], Projection(last, None, None), split)


def with_gradients(tensors: list[Tensor], split: TensorSplit | None) -> tuple[Tensor, ...]:
    *inputs, gradient = tensors
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    out = block(*leaves, split)
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient))


def shares_of(tensors: list[Tensor], rank: int, ranks: int, *, sequence: bool) -> list[Tensor]:
    """A rank's part of the input, the weights and the gradient of the result."""
    dims = [1 if sequence else None, 0, 0, 1, 1 if sequence else None]
    return [
        whole.clone() if dim is None else whole.chunk(ranks, dim)[rank].contiguous()
        for whole, dim in zip(tensors, dims, strict=True)
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp, sp"])
def test_every_order_of_hosts_and_devices_gives_the_same_numbers(ranks: int, sequence: bool) -> None:
    draw = torch.Generator().manual_seed(3)
    sizes = ((B, S, H), (H, H), (H, H), (H, H), (B, S, H))
    wholes = [torch.randn(size, dtype=torch.float64, generator=draw) for size in sizes]
    wanted = with_gradients(wholes, None)
    for seed in range(8):
        world = World(ranks, seed, eager=(0, 2**20)[seed % 2], record_streams=False)

        def host(rank: int, world: World = world) -> tuple[Tensor, ...]:
            own = shares_of(wholes, rank, ranks, sequence=sequence)
            world.gpus[rank].drain("to have copied")
            world.gpus[rank].waits.clear()
            split = TensorParallel(Backend(world, rank, "tp", range(ranks)), sequence=sequence)
            found = with_gradients(own, split)
            assert not world.gpus[rank].waits, "the host waited for its device"
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor, "dist", Dist)
            patch.setattr(tensor, "all_gather", Dist.all_gather)
            patch.setattr(tensor, "reduce_scatter", Dist.reduce_scatter)
            found = world.run(host)
        out, of_x, *of_weights = wanted
        for rank, parts in enumerate(found):
            shares = shares_of([of_x, *of_weights, out], rank, ranks, sequence=sequence)
            for part, share in zip(parts, [shares[-1], *shares[:-1]], strict=True):
                torch.testing.assert_close(part, share, rtol=1e-11, atol=1e-12)
