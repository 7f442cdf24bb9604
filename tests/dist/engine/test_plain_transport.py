"""The plain transport: the recipes' lists on emulated devices, and what is made beside the process group."""

from __future__ import annotations

from types import SimpleNamespace

import pipeline
import pytest
import torch
import torch.distributed as dist
from emulated_pipeline import expected, run_step
from emulated_world import World
from ranks import run_ranks

from ppctl.comm.communicator import Communicator, FusedBatch, LooseBatch
from ppctl.comm.connections import connections_of
from ppctl.comm.modes import Modes
from ppctl.config.resources import recipes
from ppctl.errors import ConfigError
from ppctl.launch.planning import planned
from ppctl.megatron.p2p_communication import OverlapError, P2PCommunicator
from ppctl.schedule.action import Schedule
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import make_schedule


def small_lists() -> list[Schedule]:
    """What the recipes run on CUDA, with two ranks and a few microbatches; each kind of list once."""
    found: dict[tuple[str, int], Schedule] = {}
    for recipe in recipes():
        _, plan, problems = planned([f"+recipe={recipe}", "+scale=smoke", "launch.transport=plain"])
        assert plan is not None, problems
        asked = plan.schedule
        assert asked.batched and not asked.pairs
        vpp = min(asked.placement.num_stages // asked.placement.pp, 3)
        made = make_schedule(asked.name, pp=2, vpp=vpp, num_microbatches=4)
        found[asked.name, vpp] = lower(made, batched=True)
    return [*found.values()]


def test_the_recipes_lists_end_on_emulated_devices_whose_groups_connect_at_the_first_batch() -> None:
    lists = small_lists()
    assert {"1f1b", "interleaved_1f1b", "dualpipev"} <= {schedule.name for schedule in lists}
    for schedule in lists:
        world = World(schedule.placement.pp, seed=3, connected=False)
        assert run_step(world, schedule, modes=Modes(batched=True)).equals(expected(schedule)), schedule.name


@pytest.mark.parametrize(("name", "vpp"), [("1f1b", 1), ("interleaved_1f1b", 2), ("dualpipev", 2)])
def test_ranks_that_drain_their_devices_in_one_step_do_not_wait_for_each_other(name: str, vpp: int) -> None:
    """Kernels loaded and memory freed at any time, which on channels hangs in nearly every run (decision 29)."""
    for seed in range(3):
        schedule = lower(make_schedule(name, pp=2, vpp=vpp, num_microbatches=4), batched=True)
        world = World(2, seed, lazy_loading=True, full="frees")
        assert run_step(world, schedule, modes=Modes(batched=True)).equals(expected(schedule))
        assert all(gpu.waits["to free memory"] for gpu in world.gpus)


def beside_the_group() -> tuple[int, list[tuple[type, bool]], bool]:
    group = dist.group.WORLD
    assert group is not None
    fixed = Communicator(group, transport="plain")
    announced = Communicator(group, Modes(variable=True), transport="plain")
    kinds = [(type(batch), getattr(batch, "one_by_one", False)) for batch in (fixed.batch(), announced.batch())]
    made = len(connections_of(group)._made)
    Communicator(group, transport="channels")
    return made, kinds, len(connections_of(group)._made) > 0


def test_no_backend_is_made_beside_the_pipelines_group() -> None:
    for made, kinds, on_channels in run_ranks(beside_the_group, 2):
        assert (made, kinds, on_channels) == (0, [(FusedBatch, False), (LooseBatch, True)], True)


def refusals() -> list[tuple[str, str]]:
    config = SimpleNamespace(batch_p2p_comm=False, overlap_p2p_comm=True, pipeline_dtype=torch.float32)
    communicator = P2PCommunicator(dist.group.WORLD, config, transport="plain")
    with pytest.raises(OverlapError) as overlapped:
        communicator.send_forward_recv_forward(torch.zeros(1), True, [1], overlap_p2p_comm=True)
    with pytest.raises(ConfigError) as unknown:
        P2PCommunicator(dist.group.WORLD, config, transport="fast")
    schedule = lower(make_schedule("1f1b", pp=2, vpp=1, num_microbatches=2))
    with pytest.raises(ConfigError) as ahead:
        pipeline.run_case(schedule, communicator)
    problems = [each.value.problems[0] for each in (overlapped, unknown, ahead)]
    return [(problem.code, problem.remedy) for problem in problems]


def test_what_only_channels_can_do_is_refused_with_its_remedy() -> None:
    told = [
        ("PP-E117", "P2PCommunicator(pp_group, config, transport='channels')"),
        ("PP-E103", "transport='auto'"),
        ("PP-E393", "ppctl.schedule.passes.lower(schedule, batched=True)"),
    ]
    assert run_ranks(refusals, 2) == [told] * 2
