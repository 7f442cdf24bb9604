"""Bytes that a rank of every pp_rank sends in a step, by axis and kind.

Knows which keys of the config decide over it. Must not know what is exchanged (`ppctl.cost.traffic`, `.step_traffic`).
"""

from __future__ import annotations

from collections.abc import Sequence

from ppctl.config.schema import RunConfig
from ppctl.cost.step_traffic import Stages, Sums, once_a_step
from ppctl.cost.traffic import stage_passes
from ppctl.plan.memory import message_bytes, setting_of
from ppctl.plan.sharing import sharding_of
from ppctl.plan.stages import precision_of
from ppctl.plan.types import Exchange, StageSpec
from ppctl.schedule.action import Schedule
from ppctl.topology import ParallelSizes


def step_traffic(
    config: RunConfig,
    stages: Sequence[StageSpec],
    sizes: ParallelSizes,
    schedule: Schedule,
    micro_batch_size: int,
    calls: int,
) -> tuple[tuple[Exchange, ...], ...]:
    """pp_rank -> the exchanges of a step of so many schedule calls."""
    model, setting, precision = config.model, setting_of(config, sizes, micro_batch_size), precision_of(config)
    microbatches = calls * schedule.num_microbatches
    scatters, muon = config.launch.device != "cpu", config.optim.name == "muon"
    sums = Sums(sharding_of(config, sizes), precision.gradient, precision.weight, scatters, muon)
    sp = config.parallel.sequence_parallel
    by_rank = [[stage for stage in stages if stage.pp_rank == pp_rank] for pp_rank in range(sizes.pp)]
    layers = [[stage.layers for stage in own] for own in by_rank]
    found = []
    for pp_rank, (own, held) in enumerate(zip(by_rank, Stages.each(model, layers), strict=True)):
        total = once_a_step(model, held, sizes, sums, sequence_parallel=sp)
        for stage in own:
            total.add(stage_passes(model, stage.layers, setting, stage.stage).all, microbatches)
            for edge, other in ((stage.sends, stage.stage + 1), (stage.receives, stage.stage - 1)):
                if edge and stages[other].pp_rank != pp_rank:
                    total.note("pp", "send", microbatches * message_bytes(edge), microbatches * len(edge))
        found.append(tuple(Exchange(axis, kind, *numbers) for (axis, kind), numbers in total.shown))
    return tuple(found)
