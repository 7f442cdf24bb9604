"""Schedules that several test files go over."""

from __future__ import annotations

import random
from collections.abc import Iterator

from ppctl.schedule.action import Action, Op, Placement, Schedule
from ppctl.schedule.policies import make_schedule

Sizes = tuple[str, int, int, int, int]
"""name, pp, vpp, num_microbatches, microbatch group"""


def grid(max_pp: int = 8, max_vpp: int = 4) -> Iterator[Sizes]:
    """pp <= 8, vpp <= 4, m <= 4 pp, every policy, the default group and larger ones."""
    for pp in range(1, max_pp + 1):
        for vpp in range(1, max_vpp + 1):
            for m in range(1, 4 * pp + 1):
                yield "forward_only", pp, vpp, m, pp
                yield "gpipe", pp, vpp, m, pp
                if vpp == 1:
                    yield "1f1b", pp, vpp, m, pp
                for group in sorted({pp, pp + 1, 2 * pp + 1}):
                    yield "interleaved_1f1b", pp, vpp, m, group


def sample(count: int) -> list[Sizes]:
    return sorted(random.Random(20).sample(list(grid()), count))


def made(sizes: Sizes) -> Schedule:
    name, pp, vpp, m, group = sizes
    return make_schedule(name, pp=pp, vpp=vpp, num_microbatches=m, microbatch_group_size=group)


def v_shaped() -> Schedule:
    """Two ranks, four stages down and back up, one of two backwards split."""
    text = "0F0,3F0,0F1,3I0,3F1,3W0,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1I0,2B1,1W0,1B1\n"
    return Schedule.from_csv(text, name="v", placement=Placement("v", 2, 4))


def out_of_order() -> Schedule:
    """Two ranks whose second uses the messages of a channel in another order than they are sent."""
    text = "0F0,0F1,0F2,0B2,0B0,0B1\n1F2,1B2,1F0,1F1,1B0,1B1\n"
    return Schedule.from_csv(text, name="crossed")


def with_row(schedule: Schedule, pp_rank: int, row: list[Action]) -> Schedule:
    """The schedule with another list for one rank."""
    rows = [*schedule.actions]
    rows[pp_rank] = tuple(row)
    return Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(rows), schedule.capacities)


MESSAGE_OPS = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B)
