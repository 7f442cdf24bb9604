"""Pairs of a forward and a backward: how lists get them, and whether a rank can run the two side by side.

The two actions of a pair advance in turns: the messages of one are under way while the other computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from itertools import chain, pairwise

from ppctl.errors import Problem, some
from ppctl.schedule.action import COMPUTE, INPUT_GRADIENTS, Action, Op, Pair, Schedule, deps, grouped


def pair_up(schedule: Schedule) -> Schedule:
    """The schedule with every backward and the forward right after it as a pair, in which the forward comes first. It
    is for 1F1B, whose ranks then hold one microbatch more."""
    rows: list[tuple[Action, ...]] = []
    pairs: list[Pair] = []
    for row in schedule.actions:
        paired = list(row)
        for index, (before, after) in enumerate(pairwise(row)):
            if before.op is Op.B and after.op is Op.F:
                pairs.append(Pair(after, before))
                paired[index : index + 2] = pairs[-1]
        rows.append(tuple(paired))
    return replace(schedule, actions=tuple(rows), pairs=frozenset(pairs))


def deferred_weights(schedule: Schedule) -> Schedule:
    """The schedule with the backward of every pair split: I beside the forward, and W after the pair."""
    return in_halves(schedule, {pair.backward for pair in schedule.pairs if pair.backward.op is Op.B})


def in_halves(schedule: Schedule, backwards: Collection[Action]) -> Schedule:
    """The schedule with an I and a W right after it in place of each of these Bs; the I takes a B's place in a pair."""
    halves = {each: (each._replace(op=Op.I), each._replace(op=Op.W)) for each in backwards}
    rows = tuple(tuple(half for action in row for half in halves.get(action, (action,))) for row in schedule.actions)
    pairs = frozenset(Pair(ahead, halves.get(back, (back,))[0]) for ahead, back in schedule.pairs)
    return replace(schedule, actions=rows, pairs=pairs)


def wrong_pairs(schedule: Schedule) -> Iterator[Problem]:
    """Yield the problems of a schedule's pairs; the schedule must be sound without them.

    A pair is an F and a B or I. In their rank's list the backward comes after the forward, with only messages between
    the two. An action is in one pair at most. Neither may need the other, not even through other ranks' lists: both
    must be able to start together.
    """
    if not schedule.pairs:
        return
    rows = tuple(tuple(action for action in row if action.op in COMPUTE) for row in schedule.actions)
    groups = [grouped(row, schedule.pairs) for row in rows]
    together = {each for row in groups for each in row}
    odd = [pair for pair in schedule.pairs if pair.forward.op is not Op.F or pair.backward.op not in INPUT_GRADIENTS]
    for rule, broken in (
        ("a pair is an F and then a B or I", odd),
        ("an action is in one pair at most", _with_shared_actions(schedule.pairs)),
        ("the two actions of a pair stand side by side in a rank's list", schedule.pairs - together),
    ):
        if broken:
            yield Problem("PP-E318", f"{rule}, but not so in {some(sorted(broken))}")
            return
    plain = replace(schedule, actions=rows, capacities={}, batched=False)
    if stuck := [each for each in _circle(plain, groups) if isinstance(each, Pair)]:
        message = f"the backward cannot start before a forward of these pairs has ended: {some(sorted(stuck))}"
        yield Problem("PP-E318", message)


def _with_shared_actions(pairs: Collection[Pair]) -> list[Pair]:
    """The pairs with an action that is in another pair as well."""
    times = Counter(chain.from_iterable(pairs))
    if len(times) == 2 * len(pairs):
        return []
    return [pair for pair in pairs if max(times[action] for action in pair) > 1]


def _circle(plain: Schedule, groups: Sequence[Sequence[Action | Pair]]) -> list[Action | Pair]:
    """Actions that wait for each other in a circle if pairs start together; empty if there is no circle."""
    entry = {action: each for row in groups for each in row for action in _actions_of(each)}
    needed = TopologicalSorter[Action | Pair]()  # each points to those that it needs: the first circle is found first
    for row in groups:
        for before, each in zip([None, *row], row, strict=False):
            for need in chain.from_iterable(deps(action, plain) for action in _actions_of(each)):
                needed.add(entry[need], each)
            if before is not None:
                needed.add(before, each)
    try:
        needed.prepare()
    except CycleError as error:
        return list(error.args[1][1:])
    return []


def _actions_of(each: Action | Pair) -> tuple[Action, ...]:
    return each if isinstance(each, Pair) else (each,)
