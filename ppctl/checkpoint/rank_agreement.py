"""Agreement between the ranks that save or load a checkpoint: one result for all, or one error for all.

A rank that fails alone would leave its peers waiting in the next collective, therefore every local step ends in an
exchange of outcomes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional, TypeVar, cast

import torch.distributed as dist

from ppctl.checkpoint.disk import problems_of
from ppctl.comm.groups import broadcast_bytes, gather_bytes
from ppctl.errors import CheckpointError, Problem
from ppctl.records import wire

T = TypeVar("T")
R = TypeVar("R")


class AgreeingRanks:
    """The ranks of a process group (None: the default group), or this process alone if torch.distributed is not
    initialised. The group is gloo's, or NCCL's if the current device is set."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    def agree(
        self,
        what: str,
        work: Callable[[], T],
        conclude: Callable[[list[T]], R],
        *,
        each: Any = None,
        result: Any = None,
    ) -> R:
        """Run `work` on every rank, then `conclude` on rank 0 with all results in rank order; returns what `conclude`
        returned, on all ranks. All ranks call this together.

        `each` is the annotation (`ppctl.records.wire`) of what `work` returns, `result` of what `conclude` returns. If
        either raises on any rank, all ranks raise CheckpointError with the problems of all. `what` names the work in
        messages, as an infinitive.
        """
        sent, cause = self._attempt(what, each, work)
        outcomes = [
            self._read(what, each, share) for share in ([sent] if self.size == 1 else gather_bytes(sent, self.group))
        ]
        if problems := tuple(dict.fromkeys(problem for some, _ in outcomes for problem in some)):
            sent = wire.packed(_outcome(result), (problems, None))
        elif self.rank == 0:
            sent, cause = self._attempt(what, result, lambda: conclude([value for _, value in outcomes]))
        problems, verdict = self._read(what, result, sent if self.size == 1 else broadcast_bytes(sent, self.group))
        if problems:
            raise CheckpointError(problems) from cause
        return cast(R, verdict)

    def _attempt(self, what: str, kind: Any, work: Callable[[], Any]) -> tuple[bytes, Exception | None]:
        """Do `work`; returns the bytes of its result or problems, and its exception, which stays on this rank."""
        try:
            return wire.packed(_outcome(kind), ((), work())), None
        except Exception as error:
            return wire.packed(_outcome(kind), (problems_of(error, what, self.rank), None)), error

    def _read(self, what: str, kind: Any, sent: bytes) -> tuple[tuple[Problem, ...], Any]:
        try:
            return cast(tuple[tuple[Problem, ...], Any], wire.unpacked(_outcome(kind), sent))
        except wire.Malformed as error:
            return problems_of(error, what, self.rank), None


def _outcome(kind: Any) -> Any:
    """Return the annotation of a rank's outcome: its problems, or a value of the annotation `kind`."""
    return tuple[tuple[Problem, ...], Optional[kind]]  # noqa: UP045 - `kind | None` is no annotation if it is None
