"""Computed from a rank's list before it runs: when data parallelism communicates, and which forwards are recomputed.

The rules are Megatron's; a user's functions act on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

from ppctl.schedule.action import BACKWARDS, INPUT_GRADIENTS, WEIGHT_GRADIENTS, Action, Op


class SyncKind(StrEnum):
    """HOLD keeps backwards from starting communication until RELEASE; the other two start it for one stage."""

    HOLD = "hold"
    RELEASE = "release"
    REDUCE = "reduce"
    """Reduce the gradients of a stage."""
    GATHER = "gather"
    """Gather the parameters of a stage."""


class Sync(NamedTuple):
    """One event. `stage` is -1 if it concerns the whole rank."""

    kind: SyncKind
    stage: int = -1


HOLD, RELEASE = Sync(SyncKind.HOLD), Sync(SyncKind.RELEASE)
_Events = tuple[Sync, ...]


@dataclass(frozen=True)
class SyncPlan:
    """One rank's events: before its first action, before and after actions, and when all messages are delivered."""

    start: _Events
    before: Mapping[Action, _Events] = field(default_factory=dict)
    after: Mapping[Action, _Events] = field(default_factory=dict)
    end: _Events = ()


_FORWARDS = frozenset({Op.F})


def _of(row: Sequence[Action], ops: Set[Op]) -> list[Action]:
    return [action for action in row if action[0] in ops]


def sync_without_pipelining(row: Sequence[Action]) -> SyncPlan:
    """The events without a pipeline: held for all microbatches but the last, forward and backward."""
    return SyncPlan((HOLD,), before={_of(row, _FORWARDS)[-1]: (RELEASE,)})


def sync_of_one_chunk(row: Sequence[Action], *, reduces: bool) -> SyncPlan:
    """The events for one chunk: held until the last backward, which starts the communication itself (`_released`). A
    function that reduces gradients (`reduces`) is called after all actions instead; but not on the first stage, which
    ends last and so has no bubble for the call: there, too, the last backward communicates."""
    backwards = _of(row, WEIGHT_GRADIENTS)
    if not backwards:
        return SyncPlan((HOLD,), end=(RELEASE,))
    stage = backwards[-1].stage
    if reduces and stage > 0:
        return SyncPlan((HOLD,), end=(RELEASE, Sync(SyncKind.REDUCE, stage)))
    released = _released(row)
    return SyncPlan((HOLD,), released, {half: (HOLD,) for half in released if half.op is Op.I})


def _released(row: Sequence[Action]) -> dict[Action, _Events]:
    """The events before the last backward of every stage, or before both halves if it is split: undeferred gradients
    are complete with the last I, deferred ones with the last W. Ws of earlier microbatches in between start nothing."""
    ends = [{action.stage: action for action in _of(row, ops)} for ops in (INPUT_GRADIENTS, WEIGHT_GRADIENTS)]
    return {action: (RELEASE,) for last in ends for action in last.values()}


def sync_of_chunks(
    row: Sequence[Action], pp_rank: int, *, stages: Sequence[int], reduces: bool, gathers: bool
) -> SyncPlan:
    """The interleaved events: released for the last backward of every chunk. Functions that reduce and gather are
    called `pp_rank` backwards late and `pp_rank` forwards early, so that the ranks, each one action behind the
    previous, call at about the same time. Calls without a remaining action come at the end, in chunk order. `stages`
    are the rank's, in chunk order.
    """
    backwards = _of(row, WEIGHT_GRADIENTS)
    start = (HOLD, *(Sync(SyncKind.GATHER, stage) for stage in stages[:2] if gathers))
    ahead = _gather_events(_of(row, _FORWARDS), pp_rank, stages) if gathers else {}
    if not reduces:
        released = _released(row)
        return SyncPlan(start, ahead | released, dict.fromkeys(released, (HOLD,)), (RELEASE,))
    after: dict[Action, _Events] = {}
    late = set()
    last = {action.stage: index for index, action in enumerate(backwards)}
    for index in last.values():
        stage = backwards[index].stage
        if index + pp_rank < len(backwards):
            after[backwards[index + pp_rank]] = (RELEASE, Sync(SyncKind.REDUCE, stage), HOLD)
        else:
            late.add(stage)
    return SyncPlan(
        start, ahead, after, (RELEASE, *(Sync(SyncKind.REDUCE, stage) for stage in stages if stage in late))
    )


def gathers_ahead(row: Sequence[Action]) -> dict[Action, int]:
    """Forward of a rank's list -> the stage whose weights begin to be gathered before it, once a step: the forward
    before the stage's first, so that the gather runs beside it. The list's first stage has none, and is left out."""
    forwards = _of(row, _FORWARDS)
    first: dict[int, int] = {}
    for index, action in enumerate(forwards):
        first.setdefault(action.stage, index)
    return {forwards[index - 1]: stage for stage, index in first.items() if index}


def _gather_events(forwards: list[Action], pp_rank: int, stages: Sequence[int]) -> dict[Action, _Events]:
    """The gather events of chunks from the third on: before forwards at or shortly before the previous chunk's
    start."""
    following = dict(pairwise(stages[1:]))
    ahead: dict[Action, _Events] = {}
    for index, action in enumerate(forwards):
        if action.mb == 0 and action.stage in following:
            when = forwards[max(index - pp_rank, 0)]
            ahead[when] = (*ahead.get(when, ()), Sync(SyncKind.GATHER, following[action.stage]))
    return ahead


def checkpoint_flags(row: Sequence[Action], partial: int | None, window: int) -> dict[Action, bool]:
    """For every forward of a rank's list whether all its layers are recomputed; empty if `partial` is None. The rule is
    Megatron's `num_microbatches_with_partial_activation_checkpoints`: of every `window` forwards, which is how many are
    in flight at most, the first `partial` keep more activations."""
    if partial is None:
        return {}
    forwards = [action for action in row if action.op is Op.F]
    return {action: index % window >= partial for index, action in enumerate(forwards)}


def forwards_in_flight(row: Sequence[Action]) -> int:
    """Forwards in flight before a rank's first backward; without a backward, one more than all forwards."""
    forwards = 0
    for action in row:
        if action.op in BACKWARDS:
            return forwards
        forwards += action.op is Op.F
    return forwards + 1
