"""Lets a pipeline's ranks agree, before messages, on results and errors, and on whether all make the same call.

A rank that went on alone would wait for messages that no rank sends. Every function with `ranks` is a collective.
"""

from __future__ import annotations

import hashlib
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist

from ppctl.checkpoint.rank_agreement import AgreeingRanks
from ppctl.errors import CheckpointError, ConfigError, PpctlError, Problem, pasted

CODE = "PP-E130"
FAILED = "PP-E553"
_DIGEST_BYTES = 7
"""Bytes of a digest: few enough that the digest and its negative are 64-bit numbers."""


def misuse(message: str, remedy: str) -> ConfigError:
    """The error for a config, stages or a batch that a pipeline cannot run (PP-E130)."""
    return ConfigError(Problem(CODE, message, remedy))


def agreed(
    ranks: AgreeingRanks,
    what: str,
    work: Callable[[], Any],
    *,
    of: Any = None,
    own: bool = False,
    joined: Callable[[list[Any]], Any] | None = None,
    to: Any = None,
) -> Any:
    """Run `work` on every rank; return the first rank's result on all ranks, with `own` this rank's, with `joined` what
    it makes of the list of all ranks' results. `of` is the annotation (`ppctl.records.wire`) of the result of `work`,
    `to` that of the result of `joined`; `own` needs none. If `work` raises on any rank, an error is raised on all
    ranks: its ConfigError or CheckpointError, or PP-E553 for an exception of other code.
    """
    mine: list[Any] = []

    def attempt() -> Any:
        mine.append(work())
        return None if own else mine[0]

    conclude = joined or (lambda results: results[0])
    try:
        verdict = ranks.agree(what, attempt, conclude, each=of, result=to if joined else of)
    except CheckpointError as error:
        # ppctl's own errors need no cause: its text would be the same again.
        cause = None if isinstance(error.__cause__, PpctlError) else error.__cause__
        problems = tuple(map(_in_python, error.problems))
        of_weights = all(problem.code.startswith("PP-E5") and problem.code != FAILED for problem in problems)
        raise (CheckpointError if of_weights else ConfigError)(problems) from cause
    return mine[0] if own else verdict


def _in_python(problem: Problem) -> Problem:
    """Reword a problem for a program without a run, where a rank's exception is in that rank's own output."""
    if problem.code == "PP-E505":
        return replace(problem, remedy="df -h; ls -ld" + (f" {pasted(problem.place)}" if problem.place else ""))
    if problem.code != "PP-E507":
        return problem
    return replace(problem, code=FAILED, remedy="the traceback above the exception of that rank")


def refuse_unlike(ranks: AgreeingRanks, what: str, own: list[str]) -> None:
    """Compare lists of texts over all ranks. Raises ConfigError (PP-E130) on all ranks, with the first text that
    differs."""

    def conclude(lists: list[list[str]]) -> None:
        for rank, other in enumerate(lists):
            pairs = zip_longest(lists[0], other)
            one, two = next(((a, b) for a, b in pairs if a != b), (None, None))
            if one != two:
                message = f"rank 0 {one or 'has no more'}, rank {rank} {two or 'no more'}"
                message = f"ranks were given different {what}: {message}"
                raise misuse(message, f"the same {what} on every rank")

    agreed(ranks, f"compare {what}", lambda: own, of=list[str], joined=conclude)


def on_host(ranks: AgreeingRanks) -> bool:
    """Whether the ranks' group carries tensors of the host, or there is only one rank."""
    group: Any = ranks.group or dist.group.WORLD
    return ranks.size == 1 or torch.device("cpu") in group._device_types


class SameCall:
    """Compares three numbers of all ranks on the host: before a call's messages, whether all ranks make the same call;
    after them, whether a rank failed. Making one is a collective, too. A group without a backend for the host gets a
    second group, so that the host does not wait for the GPU."""

    def __init__(self, ranks: AgreeingRanks) -> None:
        self.alone = ranks.size == 1
        group: Any = None if self.alone else ranks.group or dist.group.WORLD
        if not on_host(ranks):
            members = dist.get_process_group_ranks(group)
            group = dist.new_group(members, backend="gloo", use_local_synchronization=True)
        self.group, self._rank = group, ranks.rank
        self._ends = torch.zeros(3, dtype=torch.int64, device="cpu")
        weakref.finalize(self, _wait_until_released, self._ends)  # runs even if the program ends without close()

    def __call__(self, text: str | None, broken: str = "") -> bool:
        """Whether every rank passes this text; a rank with an error passes None, which equals nothing. A rank whose
        earlier call ended between its messages passes the reason as `broken`: then ConfigError (PP-E554) is raised on
        all ranks. A single process goes on."""
        if self.alone:
            return text is not None
        number = 0
        if text is not None:
            number = 1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES], "big")
        largest, smallest, failed = self._largest(number, failed=bool(broken))
        if failed:
            reason = broken or f"rank {failed - 1} of the pipeline says why"
            message = f"an earlier step ended amid its messages, which other ranks may wait for: {reason}"
            raise ConfigError(Problem("PP-E554", message, "end all ranks, and start them from a checkpoint"))
        return bool(largest == -smallest and largest)

    def last_failed(self, *, failed: bool) -> int | None:
        """Return, after a call's messages, the highest rank that `failed` in the call; None if none did."""
        if self.alone:
            return None
        *_, first = self._largest(0, failed=failed)
        return first - 1 if first else None

    def _largest(self, number: int, *, failed: bool) -> tuple[int, int, int]:
        """The maxima over all ranks of the number, its negative, and 1 + this rank if it failed."""
        self._ends.copy_(torch.tensor([number, -number, self._rank + 1 if failed else 0], device="cpu"))
        dist.all_reduce(self._ends, dist.ReduceOp.MAX, group=self.group)
        largest, smallest, who = self._ends.tolist()
        return largest, smallest, who


def _wait_until_released(tensor: Any) -> None:
    """Wait until gloo's threads have released this tensor, at most a second. A thread releases it some time after the
    collective, and takes the interpreter's lock for this. If the interpreter has begun to end, Python 3.11 ends that
    thread inside a C++ destructor: the process aborts.
    """
    deadline = time.monotonic() + 1.0
    while tensor._use_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.001)
