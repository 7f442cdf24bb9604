"""Agreement between the ranks that save or load together: one result for all, or one error for all.

Knows a process group and how failures travel. Must not know files, tensors or checkpoints. A rank that fails alone
would leave its peers waiting in the next collective, therefore every local step ends in an exchange of outcomes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from ppctl.errors import CheckpointError, PpctlError, Problem

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[T]):
    """What a step gave on one rank: a value, or problems. `cause` stays on its rank (it need not be picklable)."""

    value: T | None = None
    problems: tuple[Problem, ...] = ()

    def get(self) -> T:
        return cast(T, self.value)


class AgreeingRanks:
    """The ranks of a process group (None: the default one), or this process alone where none is initialised.

    The group must carry Python objects: gloo, or NCCL with the current device set.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def agree(self, what: str, work: Callable[[], T], conclude: Callable[[list[T]], R]) -> R:
        """Run `work` on every rank, `conclude` on rank 0 with all results in rank order, and hand its result to all.

        If `work` or `conclude` raises anywhere, all ranks raise CheckpointError with the problems of all. `what` says
        what was being done, for exceptions that bring no problem of their own.
        """
        outcome, cause = self._attempt(what, work)
        outcomes = self._gather(outcome)
        verdict: _Outcome[R] = _Outcome()
        if self.rank == 0:
            problems = tuple(problem for each in outcomes for problem in each.problems)
            if problems:
                verdict = _Outcome(problems=tuple(dict.fromkeys(problems)))
            else:
                verdict, cause = self._attempt(what, lambda: conclude([each.get() for each in outcomes]))
        verdict = self._broadcast(verdict)
        if verdict.problems:
            raise CheckpointError(verdict.problems) from cause
        return verdict.get()

    def _attempt(self, what: str, work: Callable[[], T]) -> tuple[_Outcome[T], Exception | None]:
        try:
            return _Outcome(value=work()), None
        except Exception as error:
            return _Outcome(problems=problems_of(error, what, self.rank)), error

    def _gather(self, outcome: _Outcome[T]) -> list[_Outcome[T]]:
        if self.size == 1:
            return [outcome]
        outcomes: list[Any] = [None] * self.size
        first = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.gather_object(outcome, outcomes if self.rank == 0 else None, dst=first, group=self.group)
        return outcomes

    def _broadcast(self, verdict: _Outcome[R]) -> _Outcome[R]:
        if self.size == 1:
            return verdict
        box: list[Any] = [verdict]
        first = dist.get_global_rank(self.group, 0) if self.group is not None else 0
        dist.broadcast_object_list(box, src=first, group=self.group)
        return cast(_Outcome[R], box[0])


def problems_of(error: BaseException, what: str, rank: int) -> tuple[Problem, ...]:
    """The problems that an exception stands for: its own, the file system's, or the fact that a rank failed."""
    if isinstance(error, PpctlError):
        return error.problems
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        place = str(error.filename) if error.filename else ""
        remedy = "free space or mend the directory (`df -h`, `ls -ld`), then `ppctl resume`"
        return (Problem("PP-E505", f"rank {rank} could not {what}: {reason}", remedy, place),)
    message = f"rank {rank} failed to {what}: {type(error).__name__}: {error}"
    return (Problem("PP-E507", message, remedy=f"see the traceback in logs/rank-{rank:04d}.log"),)
