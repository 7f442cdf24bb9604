"""The positions of actions in a rank's list: for every operation of a stage, the index of each microbatch.

Schedules hold many actions and few lanes, and lists of numbers are compared at C speed: what judges whole lists
(`verify`) asks here. Must not know what is right or wrong. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import itemgetter

from ppctl.schedule.action import BACKWARDS, MESSAGES, Action, Op, Schedule, lane

Key = tuple[Op, int]
"""An operation and a stage."""

Lanes = dict[Key, list[int]]
"""(operation, stage) -> the index in the rank's list for each microbatch, -1 for none (REDUCE_GRAD has one)."""

Wanted = dict[Key, Sequence[Action]]
"""(operation, stage) -> the actions that a rank has to run."""


def wanted_lanes(schedule: Schedule) -> list[Wanted]:
    """The lanes that every rank has to run. What a schedule has anywhere (messages, and on trained stages backwards and
    sync) it has everywhere."""
    place, count = schedule.placement, schedule.num_microbatches
    ops = set(map(itemgetter(0), chain.from_iterable(schedule.actions)))
    messages, backward = bool(ops & MESSAGES), bool(ops & BACKWARDS)
    sync = backward and (messages or Op.REDUCE_GRAD in ops)
    wanted: list[Wanted] = [{} for _ in range(place.pp)]
    split = _by_stage(schedule)
    for stage in range(place.num_stages):
        own = wanted[place.rank_of(stage)]
        own[Op.F, stage] = lane(Op.F, stage, count)
        trained = stage >= schedule.frozen_stages
        if backward and trained:
            own |= _backwards(stage, count, split.get(stage, ()))
        if sync and trained:
            own[Op.REDUCE_GRAD, stage] = [Action(Op.REDUCE_GRAD, stage)]
        if stage and messages and not place.is_local(stage - 1):
            before = wanted[place.rank_of(stage - 1)]
            both = backward and schedule.gradient_leaves(stage)
            for op in (Op.SEND_F, Op.RECV_B) if both else (Op.SEND_F,):
                before[op, stage - 1] = lane(op, stage - 1, count)
            for op in (Op.RECV_F, Op.SEND_B) if both else (Op.RECV_F,):
                own[op, stage] = lane(op, stage, count)
    return wanted


def _by_stage(schedule: Schedule) -> Mapping[int, set[int]]:
    """The microbatches that exist and whose backward is split, by stage."""
    started: dict[int, set[int]] = {}
    for stage, mb in schedule.split:
        if 0 <= mb < schedule.num_microbatches:
            started.setdefault(stage, set()).add(mb)
    return started


def _backwards(stage: int, count: int, split: Iterable[int]) -> Wanted:
    """B of every microbatch, or I and W of those that are split."""
    halves = sorted(split)
    if not halves:
        return {(Op.B, stage): lane(Op.B, stage, count)}
    whole = sorted({*range(count)} - {*halves})
    lanes = ((Op.B, whole), (Op.I, halves), (Op.W, halves))
    return {(op, stage): [Action(op, stage, mb) for mb in mbs] for op, mbs in lanes if mbs}


def located(row: Sequence[Action], wanted: Wanted, num_microbatches: int) -> Lanes | None:
    """The places of a rank's actions; None where its list is not exactly what is wanted, each action once."""
    position = dict(zip(row, range(len(row)), strict=True))
    if not len(position) == len(row) == sum(map(len, wanted.values())):
        return None
    try:
        places = {key: list(map(position.__getitem__, actions)) for key, actions in wanted.items()}
    except KeyError:
        return None
    for key, actions in wanted.items():
        if key[0] in BACKWARDS and len(actions) < num_microbatches:
            of = {action.mb: at for action, at in zip(actions, places[key], strict=True)}
            places[key] = [of.get(mb, -1) for mb in range(num_microbatches)]
    return places
