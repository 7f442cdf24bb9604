"""Devices whose memory is full: an allocation that the driver has to serve waits for the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest
from devices import Beat
from emulated_memory import ROUNDING
from emulated_pipeline import emulation, expected, make_step, run_step
from emulated_world import Deadlock, World
from unit_plan import plan

from ppctl.engine.pace import HELD
from ppctl.hang.verdict import verdict
from ppctl.records.rank_records import RankState
from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule

PP = 4
MESSAGE = ROUNDING
"""Bytes of a message between the stages of `pipeline`, of less than 64."""
SCHEDULES = {"1f1b": 1, "interleaved_1f1b": 2, "dualpipev": 2}
SEEDS = range(2)


@cache
def scheduled(name: str) -> Schedule:
    return lower(make_schedule(name, pp=PP, vpp=SCHEDULES[name], num_microbatches=8))


@cache
def peaks_of(name: str) -> list[int]:
    """The most bytes in use on each rank in some interleavings, with messages that are held longer in others."""
    found = []
    for seed in SEEDS:
        world = World(PP, seed)
        run_step(world, scheduled(name), dry=True)
        found.append([gpu.memory.mapped for gpu in world.gpus])
    return [max(each) + HELD * MESSAGE for each in zip(*found, strict=True)]


def hangs(name: str, seed: int, full: str, who: Sequence[int] = range(PP), peaks: Sequence[int] | None = None) -> bool:
    """Whether a step of which the devices of `who` are full hangs; else it has the right bits."""
    world = World(PP, seed)
    for rank in who:
        world.gpus[rank].full = full
    try:
        found = run_step(world, scheduled(name), dry=True, peaks=peaks)
    except Deadlock as stood:
        assert str(stood).count("to free memory") > 1, "one rank that frees memory holds up nobody for ever"
        return True
    assert found.equals(expected(scheduled(name)))
    return False


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks_that_free_memory_in_one_step_hang_and_none_does_with_the_peak_reserved(name: str) -> None:
    assert all(hangs(name, seed, "frees") for seed in SEEDS)
    assert not any(hangs(name, seed, "frees", peaks=peaks_of(name)) for seed in SEEDS)
    assert hangs(name, 0, "frees", peaks=[peak // 2 for peak in peaks_of(name)]), "half of the peak is not enough"


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_rank_that_frees_memory_hangs_nobody_and_neither_do_ranks_that_unmap_it(name: str) -> None:
    """cudaFree waits for the device; unmapping for the current stream, and for what was recorded on other streams."""
    assert not hangs(name, 0, "frees", who=[1])
    assert not hangs(name, 0, "unmaps")


def test_the_verdict_on_such_a_hang_names_it_as_a_likely_cause() -> None:
    made = plan(
        pp=PP,
        gbs=8,
        mbs=1,
        launch__transport="channels",
        parallel__overlap_p2p_comm=True,
        parallel__batch_p2p_comm=False,
    )
    world, clock = World(PP, full="frees"), [0]
    beats = [Beat(clock) for _ in world.gpus]
    with emulation(world), pytest.raises(Deadlock):
        world.run(make_step(world, made.schedule, dry=True, heartbeats=beats))
    states = [
        RankState(rank, "training", 0, beat.index, float(beat.since), beat.working) for rank, beat in enumerate(beats)
    ]
    told = verdict(made, states, 200.0, 1e6)
    assert told.code == "PP-E706"
    assert "ranks 0, 1, 2 compute at once: on GPUs their allocators may wait for each other (PP-E822)" in told.message
