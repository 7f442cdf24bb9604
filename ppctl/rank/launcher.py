"""What a rank does itself, depending on who started it: watch the job, write status.json, print for a person.

Knows the two kinds of launchers. Must not know how ranks are started, nor how a rank trains.
"""

from __future__ import annotations

import signal
import sys
import traceback
from contextlib import suppress

from ppctl import checkpoint_folder
from ppctl.engine.interpreter import EngineError
from ppctl.errors import PpctlError
from ppctl.hang.limits import Limits
from ppctl.heartbeat import HeartbeatFile
from ppctl.rank.own_process import Listener, end_after
from ppctl.rank.rendezvous import SharedRun
from ppctl.rank.watchdog import NodeWatch
from ppctl.rundir import RunDir
from ppctl.train.loop import TrainingEnd


class PpctlLauncher:
    """What a rank does under ppctl's own launcher (`launch/watch.py`), which does the rest: print a traceback."""

    def make_watch(self, shared: SharedRun, limits: Limits) -> NodeWatch | None:
        """What has to watch the job on every node."""
        return None

    def begin(self, run: RunDir, listener: Listener, heartbeat: HeartbeatFile) -> None:
        """Rank 0 has joined the others."""

    def end(self, outcome: TrainingEnd) -> None:
        """Rank 0 has written the result."""

    def report(self, error: Exception, run: RunDir | None, rank: int) -> None:
        """A rank has failed, and has written its failure into `run`."""
        traceback.print_exception(error)


class ExternalLauncher(PpctlLauncher):
    """What a rank does under torchrun, srun or another scheduler, which starts ranks and nothing more: all the rest."""

    def make_watch(self, shared: SharedRun, limits: Limits) -> NodeWatch | None:
        """What has to watch the job on every node."""
        tried = checkpoint_folder.candidates(shared.config.checkpoint.resume, shared.run.checkpoints)
        return NodeWatch(shared.run, shared.plan, limits, checkpoint_folder.step_of(tried[0].path if tried else None))

    def begin(self, run: RunDir, listener: Listener, heartbeat: HeartbeatFile) -> None:
        """Write that the run goes on, and, when Ctrl-C ends it, that it was interrupted."""
        run.write_status("running", step=0)
        listener.on(signal.SIGINT, lambda: end_after(lambda: run.write_status("interrupted", step=heartbeat.step)))

    def end(self, outcome: TrainingEnd) -> None:
        """Print how the run ended, and its checkpoint."""
        how = f"stopped after step {outcome.step}, all saved: {outcome.why}" if outcome.stopped else "finished"
        print(f"{how}; {outcome.checkpoint}", flush=True)

    def report(self, error: Exception, run: RunDir | None, rank: int) -> None:
        """Write that `run` has failed, and print problems without a traceback: that is in the failure's record."""
        with suppress(OSError):
            if run is not None:
                run.write_status("failed", rank=rank)
        if isinstance(error, PpctlError) and not isinstance(error, EngineError):
            print("\n".join(f"error {problem}" for problem in error.problems), file=sys.stderr)
        else:
            traceback.print_exception(error)
