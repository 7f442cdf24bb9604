"""The connections of a pipeline's messages: both ends find each other by name, and each message goes its own way."""

from __future__ import annotations

import itertools

import pipeline
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

import ppctl.comm.communicator as communicator_module
from ppctl.comm import connections
from ppctl.comm.connections import Connections, _pair_ends, connection_name, connections_of, loop_channels
from ppctl.comm.groups import limit_of, make_group
from ppctl.errors import ScheduleError
from ppctl.plan import memory_limit
from ppctl.schedule.action import Channel
from ppctl.schedule.passes import lower
from ppctl.schedule.policies import POLICIES, make_schedule

CPU = torch.device("cpu")


def channels_of(pp: int) -> list[tuple[Channel, ...]]:
    """The channels of every policy with up to four chunks, loop and V."""
    found = {loop_channels(pp)}
    for name, vpp in itertools.product(POLICIES, range(1, 5)):
        try:
            schedule = make_schedule(name, pp=pp, vpp=vpp, num_microbatches=2 * pp)
        except ScheduleError:
            continue
        found.add(tuple(sorted(lower(schedule).capacities)))
    return sorted(found)


class Ends:
    """Stands for a backend: says under which key of the shared store an end looks for the other one."""

    def __init__(self, store, position, ranks, name, limit):
        self.position, self.ranks, self.name = position, tuple(ranks), name
        store.set(f"end {position}", str(dist.get_rank()))
        self.other = lambda: int(store.get(f"end {1 - position}"))


def meetings():
    """For every pipeline size: (channels made here, those whose other end was found where this end looks for it)."""
    connections.MAKERS = {"ends": Ends}
    rank, told = dist.get_rank(), []
    for _ in range(rank % 3):  # the ranks have made different numbers of groups before
        dist.new_group([rank], use_local_synchronization=True)
    for pp in range(2, 9):
        group = dist.new_group(range(pp))
        for channels in channels_of(pp):
            if rank < pp:
                own = [c for c in channels if rank in c[:2]]
                made = Connections(group)
                pairs = {c: made.of_pair("ends", c, "body") for c in own}
                dist.barrier(group)
                met = [c for c, end in pairs.items() if {rank, end.other()} == set(c[:2]) == set(end.ranks)]
                told.append((len(own), len(met)))
    return told


def test_both_ends_of_every_channel_look_for_each_other_under_one_name() -> None:
    """pp 2 to 8, vpp to 4, loop and V, whatever groups a rank has made before."""
    for rank, told in enumerate(run_ranks(meetings, 8)):
        assert told and all(own == met > 0 for own, met in told), rank


def test_no_two_connections_share_a_name() -> None:
    pipelines = [tuple(range(first, first + 4 * step, step)) for first in range(8) for step in (1, 8)]
    parts = [f"{c.source}-{c.target}-{c.direction}/{part}" for c in loop_channels(4) for part in ("body", "header")]
    names = [connection_name(ranks, n, part) for ranks in pipelines for n in range(3) for part in parts]
    assert len(set(names)) == len(names)


def over_pairs():
    """From now on this rank's communicators have a connection of its own for each channel, as on a GPU; over gloo."""

    def ends_of(pp_group, device, channels, *, over=None, variable=False, connect=True):
        own = [c for c in sorted(channels) if pp_group.rank() in c[:2]]
        return _pair_ends(connections_of(pp_group), "gloo", device, own, variable=variable, connect=connect)

    communicator_module.make_ends = ends_of


def outcomes(cases, rounds):
    over_pairs()
    found = []
    for _ in range(rounds):
        communicators = []
        for schedule in cases:
            communicators.append(pipeline.make_communicator(schedule))
            found.append(pipeline.run_case(schedule, communicators[-1]))
        made = connections_of(communicators[0].pp_group)
        names = made.number
        for communicator in communicators:
            assert made.number == names, "one communicator has ended the connections of another"
            communicator.close()
            communicator.close()  # once more is nothing
        assert made.number == names + 1, "the last one has not ended the connections"
        dist.barrier()
    return found


@pytest.mark.parametrize("pp", [2, 3, 4])
def test_schedules_run_over_connections_of_their_own_bit_by_bit(pp: int) -> None:
    """Several communicators over one group share its connections; after they are closed there can be new ones."""
    names = [("1f1b", 1), ("interleaved_1f1b", 2), ("gpipe", 3)]
    cases = [lower(make_schedule(name, pp=pp, vpp=vpp, num_microbatches=pp + 1)) for name, vpp in names]
    told = run_ranks(outcomes, pp, cases, 2)
    for index, schedule in enumerate(cases * 2):
        (reference,) = run_ranks(pipeline.plain_loop, 1, schedule.placement.num_stages, pp + 1)
        assert pipeline.join(ranks[index] for ranks in told).equals(reference), schedule.name


def limits():
    """Of the world, a group made by ppctl, and both kinds of a pipeline's connections: seconds."""
    dist.distributed_c10d._set_pg_timeout(dist.default_pg_timeout * 3)
    group = make_group([tuple(range(dist.get_world_size()))])
    made = connections_of(group)
    backends = [made.of_all("gloo", "gradients"), made.of_pair("gloo", Channel(0, 1, "F"), "body")]
    assert dist.group.WORLD is not None
    dist.barrier()  # a connection that one end closes while the other still makes it is an error
    seconds = [limit_of(dist.group.WORLD), limit_of(group), *(backend.options._timeout for backend in backends)]
    made.close()
    return [each.total_seconds() for each in seconds]


def test_every_group_and_every_connection_obeys_the_worlds_limit() -> None:
    assert run_ranks(limits, 2) == [[3 * dist.default_pg_timeout.total_seconds()] * 4] * 2


def test_the_plan_keeps_memory_for_as_many_channels_as_a_connection_may_have():
    assert memory_limit.MESSAGE_CHANNELS == connections.MAX_CTAS
