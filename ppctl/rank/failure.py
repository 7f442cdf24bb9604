"""A rank fails: its record for the launcher and for whoever reads the run, its last lines, its exit code.

Knows where a failure is written. Must not know why a rank fails, nor who is to blame (`launch` judges that).
"""

from __future__ import annotations

import os
import traceback
from contextlib import suppress
from pathlib import Path

from ppctl.comm.channels import PeerLost
from ppctl.engine.interpreter import EngineError
from ppctl.errors import PpctlError
from ppctl.heartbeat import host_name, leave_failure
from ppctl.plan import Plan
from ppctl.private_files import NODE_DIRECTORY
from ppctl.rank.launcher import PpctlLauncher
from ppctl.rank_records import RankFailure
from ppctl.run_starts import slurm_start, start_name
from ppctl.rundir import RunDir
from ppctl.topology import RankGrid


def fail(error: Exception, run: RunDir | None, rank: int, plan: Plan | None, launcher: PpctlLauncher) -> int:
    """Write the failure into the run (beside the heartbeat if its disk is full), print it, return the exit code."""
    code = error.exit_code if isinstance(error, PpctlError) else 1
    # If a watch has written the rank's failure, then this error is only a consequence.
    if run is not None and (_was_replaced(run) or run.has_error(rank)):
        run = None
    if run is not None:
        failure = _failure_of(error, rank, plan, code)
        try:
            run.write_error(failure)
        except OSError:
            with suppress(OSError, KeyError):  # no launcher of ppctl's would look for it
                leave_failure(Path(os.environ[NODE_DIRECTORY]), failure)
    launcher.report(error, run, rank)
    return code


def _was_replaced(run: RunDir) -> bool:
    """Whether the run goes on without this rank: its node was lost, and came back when the job had been requeued."""
    return start_name(run) not in ("", slurm_start())


def _failure_of(error: Exception, rank: int, plan: Plan | None, exit_code: int) -> RankFailure:
    action = error.action if isinstance(error, EngineError) else None
    cause = error.__cause__ or error if isinstance(error, EngineError) else error
    problem, *others = cause.problems if isinstance(cause, PpctlError) else [None]
    return RankFailure(
        rank,
        str(cause) if problem is None else problem.message,
        type(cause).__name__,
        code=None if problem is None else problem.code,
        exit_code=exit_code,
        stage=None if action is None else action.stage,
        action=None if action is None else str(action),
        place="" if problem is None else problem.place,
        remedy="" if problem is None else problem.remedy,
        others=tuple(map(str, others)),
        ends=_broken_connection(cause, rank, plan),
        traceback="".join(traceback.format_exception(error)),
        host=host_name(),
    )


def _broken_connection(cause: BaseException, rank: int, plan: Plan | None) -> tuple[int, ...]:
    """The global ranks at its two ends."""
    if plan is None or not isinstance(cause, PeerLost):
        return ()
    pipeline = RankGrid(plan.sizes).group_of("pp", rank)
    return tuple(pipeline[end] for end in cause.channel[:2])
