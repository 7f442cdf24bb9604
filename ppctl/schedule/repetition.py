"""Schedules of regular policies repeat themselves: a round of microbatches in the middle, again and again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import and_, eq, is_, sub

from ppctl.schedule.action import Action, Schedule, lane, new_action

Repetition = list[tuple[int, int, int]]
"""Where each list's repetition begins, how many rounds it has one after another, and how many actions a round has."""


def repetition(schedule: Schedule, size: int) -> Repetition:
    """How every rank's list repeats a round of `size` microbatches."""
    return [_repeated(row, size, schedule.num_microbatches) for row in schedule.actions]


def rounds(found: Repetition) -> int:
    """How many rounds every list has one after another; 0 if some list repeats nothing."""
    return min(number for _, number, _ in found)


def shorter(schedule: Schedule) -> Schedule | None:
    """The schedule with fewer rounds of which this one is `stretched`; None elsewhere, and in other processes."""
    return vars(schedule).get("_shorter")


def remember(schedule: Schedule, short: Schedule) -> None:
    """Let `shorter` return `short` for a schedule. It is no field, so that it is not compared, sent or copied."""
    vars(schedule)["_shorter"] = short


def stretched(schedule: Schedule, size: int, more: int, found: Repetition | None = None) -> Schedule:
    """The schedule with so many rounds of `size` microbatches more in its middle, or fewer, if `more` is negative.
    Every list must have `rounds`, more of them than are left out. It must have no pairs."""
    rows: list[tuple[Action, ...]] = []
    count = schedule.num_microbatches + more * size
    for row, (begin, _, length) in zip(schedule.actions, found or repetition(schedule, size), strict=True):
        one = [(lane(op, stage, count), mb) for op, stage, mb in row[begin : begin + length]] if more > 0 else []
        again = [actions[mb + time * size] for time in range(more) for actions, mb in one]
        rest = row[begin - min(more, 0) * length :]
        later = [new_action((op, stage, mb + more * size if mb >= 0 else mb)) for op, stage, mb in rest]
        rows.append((*row[:begin], *again, *later))
    longer = replace(schedule, actions=tuple(rows), num_microbatches=count)
    if more > 0:
        remember(longer, schedule)
    return longer


def _repeated(row: Sequence[Action], size: int, count: int) -> tuple[int, int, int]:
    ops, stages, mbs = zip(*row, strict=True) if row else ((), (), ())
    length = size * mbs.count(count // 2)
    same = map(and_, map(is_, ops[length:], ops), map(eq, stages[length:], stages))
    alike = bytes(map(and_, same, map(size.__eq__, map(sub, mbs[length:], mbs))))
    run = max(alike.split(b"\0"), key=len)
    return alike.find(run), len(run) // length + 1 if len(run) >= length > 0 else 0, length
