"""Sums that go to owners and wholes that come from them, between emulated devices with NCCL's manners."""

from __future__ import annotations

import pytest
import torch
from emulated_nccl import Backend, Dist
from emulated_world import World
from torch import Tensor

from ppctl.geometry.matrix_owners import owned_runs
from ppctl.parallel import shard
from ppctl.parallel.shard import reduce_sums, start_sending

SHAPES = {"wide": (4, 6), "experts": (5, 3, 2), "tall": (7, 2), "one": (2, 2)}
"""Of five to eight matrices on two to twelve ranks, of which some then own nothing."""


def gradients_of(rank: int) -> list[Tensor]:
    """Whole numbers, whose sums are the same in any order."""
    draw = torch.Generator().manual_seed(rank)
    return [torch.randint(-64, 64, shape, generator=draw).float() for shape in SHAPES.values()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 12])
def test_owners_get_whole_sums_and_give_weights_and_no_host_waits(ranks: int) -> None:
    runs = list(owned_runs(SHAPES, ranks).values())
    each = [gradients_of(rank) for rank in range(ranks)]
    sizes = [sum(len(of.get(rank, ())) for of in runs) for rank in range(ranks)]
    sums = [torch.stack(of_all).sum(0) for of_all in zip(*each, strict=True)]
    for seed in range(6):
        world = World(ranks, seed, eager=(0, 2**20)[seed % 2], record_streams=False)

        def host(rank: int, world: World = world) -> tuple[list[Tensor], list[Tensor]]:
            gradients = [gradient.clone() for gradient in each[rank]]
            world.gpus[rank].drain("to have copied")
            world.gpus[rank].waits.clear()
            group = Backend(world, rank, "dp", range(ranks))
            coming = reduce_sums((gradient * 2 for gradient in gradients), runs, group)
            noise = [torch.full((size,), 7.0) for size in sizes]  # takes what is free, while sums are on their way
            parts = coming()
            del coming, noise
            sent = start_sending([part / 2 for part in parts], runs, torch.bfloat16, group)
            wholes = [torch.empty(shape, dtype=torch.bfloat16) for shape in SHAPES.values()]
            sent(wholes)
            del sent
            assert not world.gpus[rank].waits, "the host waited for its device"
            return parts, wholes

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shard, "dist", Dist)
            found = world.run(host)
        for rank, (parts, wholes) in enumerate(found):
            for part, total, of in zip(parts, sums, runs, strict=True):
                run = of.get(rank, range(0))
                assert torch.equal(part, 2 * total.reshape(-1)[run.start : run.stop])
            assert all(torch.equal(whole, total.to(torch.bfloat16)) for whole, total in zip(wholes, sums, strict=True))


def test_every_element_has_one_owner() -> None:
    for ranks in (1, 2, 3, 12):
        for shape, of in zip(SHAPES.values(), owned_runs(SHAPES, ranks).values(), strict=True):
            owned_by = [place for run in of.values() for place in run]
            assert owned_by == list(range(torch.Size(shape).numel()))
