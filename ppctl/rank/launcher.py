"""The duties of a rank whose launcher only starts ranks: watch the job, write status.json, print for a person.

Must not know how ranks are started, nor how a rank trains.
"""

from __future__ import annotations

import signal
import sys
import traceback
from contextlib import suppress

from ppctl.engine.interpreter import EngineError
from ppctl.errors import PpctlError
from ppctl.hang.progress import Limits
from ppctl.rank.own_process import Listener, end_after
from ppctl.rank.rendezvous import SharedRun
from ppctl.rank.watchdog import NodeWatch
from ppctl.runs import checkpoint_folder
from ppctl.runs.heartbeat import HeartbeatFile
from ppctl.runs.rundir import RunDir
from ppctl.train.callback import TrainingEnd


def make_watch(shared: SharedRun, limits: Limits) -> NodeWatch:
    """The watch over the job on a node."""
    tried = checkpoint_folder.candidates(shared.config.checkpoint.resume, shared.run.checkpoints)
    return NodeWatch(shared.run, shared.plan, limits, checkpoint_folder.step_of(tried[0].path if tried else None))


def show_begin(run: RunDir, listener: Listener, heartbeat: HeartbeatFile) -> None:
    """Write on rank 0 that the run goes on, and, when Ctrl-C ends it, that it was interrupted."""
    run.write_status("running", step=0)
    listener.on(signal.SIGINT, lambda: end_after(lambda: run.write_status("interrupted", step=heartbeat.step)))


def show_end(outcome: TrainingEnd) -> None:
    """Print on rank 0 how the run ended, and its checkpoint."""
    how = f"stopped after step {outcome.step}, all saved: {outcome.why}" if outcome.stopped else "finished"
    print(f"{how}; {outcome.checkpoint}", flush=True)


def show_failure(error: Exception, run: RunDir | None, rank: int) -> None:
    """Write that `run` has failed, and print problems without a traceback: that is in the failure's record."""
    with suppress(OSError):
        if run is not None:
            run.write_status("failed", rank=rank)
    if isinstance(error, PpctlError) and not isinstance(error, EngineError):
        print("\n".join(f"error {problem}" for problem in error.problems), file=sys.stderr)
    else:
        traceback.print_exception(error)
