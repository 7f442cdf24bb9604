"""The order of one rank's forwards and backwards: the schedule table, and how many forwards warm up."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, TypeVar

from ppctl.errors import Problem, ScheduleError

_T = TypeVar("_T")


class WarmupCounts(NamedTuple):
    """How a rank's forwards divide, counted in (chunk, microbatch) pairs."""

    total: int
    all_in_warmup: bool
    warmup: int
    remaining: int


def get_schedule_table(
    num_microbatches: int, num_model_chunks: int, microbatch_group_size_per_vp_stage: int
) -> list[tuple[int, int]]:
    """The order of one rank's forwards as (microbatch, chunk): group by group, in a group chunk by chunk. The last
    group has the remaining ones. Backwards run in the same order with chunk `num_model_chunks - 1 - chunk`."""
    size = microbatch_group_size_per_vp_stage
    return [
        (mb, chunk)
        for first in range(0, num_microbatches, size)
        for chunk in range(num_model_chunks)
        for mb in range(first, min(first + size, num_microbatches))
    ]


def convert_schedule_table_to_order(
    num_warmup_microbatches: int, num_model_chunks: int, schedule_table: Sequence[tuple[int, int]]
) -> list[int]:
    """Megatron-core's order of a rank: its forwards as chunk numbers from 1, its backwards as these negative. Raises
    ScheduleError for an empty table."""
    if not schedule_table:
        message = "an empty schedule table has no order"
        raise ScheduleError(Problem("PP-E304", message, "get_schedule_table(num_microbatches=1, ...)"))
    forwards = [chunk + 1 for _, chunk in schedule_table]
    backwards = [chunk - num_model_chunks for _, chunk in schedule_table]
    return in_turn(forwards, backwards, num_warmup_microbatches)


def warmup_counts(
    pp: int,
    pp_rank: int,
    *,
    num_microbatches: int,
    num_model_chunks: int = 1,
    microbatch_group_size_per_vp_stage: int | None = None,
    interleaved: bool = False,
    forward_only: bool = False,
    overlap_moe_expert_parallel_comm: bool = False,
) -> WarmupCounts:
    """How many forwards a rank runs before its first backward: the arithmetic of Megatron's get_pp_rank_microbatches.
    `interleaved`: whether Megatron's virtual size is given, even as 1."""
    total = num_microbatches * num_model_chunks
    if forward_only:
        warmup = total
    elif pp == 1:
        warmup = 0
    elif interleaved:
        group = pp if microbatch_group_size_per_vp_stage is None else microbatch_group_size_per_vp_stage
        warmup = 2 * (pp - pp_rank - 1) + (num_model_chunks - 1) * group + overlap_moe_expert_parallel_comm
    else:
        warmup = pp - pp_rank - 1
    warmup = min(warmup, total)
    return WarmupCounts(total, warmup == total, warmup, total - warmup)


def in_turn(forwards: Sequence[_T], backwards: Sequence[_T], warmup: int) -> list[_T]:
    """`warmup` forwards, then forward and backward in turn, then the remaining backwards."""
    steady = len(forwards) - warmup
    pairs = zip(forwards[warmup:], backwards[:steady], strict=True)
    return [*forwards[:warmup], *chain.from_iterable(pairs), *backwards[steady:]]
