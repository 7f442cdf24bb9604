"""Schedules of regular policies repeat themselves: a round of microbatches in the middle, again and again.

Knows how to leave out rounds, and to put more in. Must not know policies, or what a schedule without messages is
lowered to. Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from operator import and_, eq, is_, sub

from ppctl.schedule.action import Action, Schedule

_new_action = partial(tuple.__new__, Action)


def rounds(schedule: Schedule, size: int) -> int:
    """How many times every rank's list repeats a round of `size` microbatches one after another; 0 if not at all."""
    return min(_repeated(row, size, schedule.num_microbatches)[1] for row in schedule.actions)


def stretched(schedule: Schedule, size: int, more: int) -> Schedule:
    """The schedule with so many rounds of `size` microbatches more in its middle, or fewer, if `more` is negative.

    Every list must have `rounds`, more of them than are left out. It must have no pairs.
    """
    rows: list[tuple[Action, ...]] = []
    for row in schedule.actions:
        begin, _, length = _repeated(row, size, schedule.num_microbatches)
        again = [action for time in range(more) for action in _later(row[begin : begin + length], time * size)]
        rest = _later(row[begin - min(more, 0) * length :], more * size)
        rows.append((*row[:begin], *again, *rest))
    longer = replace(schedule, actions=tuple(rows), num_microbatches=schedule.num_microbatches + more * size)
    if more > 0:
        object.__setattr__(longer, "shorter", schedule)
    return longer


def _later(actions: Iterable[Action], by: int) -> Iterable[Action]:
    """The actions for microbatches that come `by` later, and those of a whole stage."""
    return map(_new_action, [(op, stage, mb + by if mb >= 0 else mb) for op, stage, mb in actions])


def _repeated(row: Sequence[Action], size: int, count: int) -> tuple[int, int, int]:
    """Where a list's repetition begins, how many rounds it has one after another, and how many actions a round has."""
    ops, stages, mbs = zip(*row, strict=True) if row else ((), (), ())
    length = size * mbs.count(count // 2)
    same = map(and_, map(is_, ops[length:], ops), map(eq, stages[length:], stages))
    alike = bytes(map(and_, same, map(size.__eq__, map(sub, mbs[length:], mbs))))
    run = max(alike.split(b"\0"), key=len)
    return alike.find(run), len(run) // length + 1 if len(run) >= length > 0 else 0, length
