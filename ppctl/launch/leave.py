"""`python -m ppctl.launch.leave RUN --step-code N`: the third step of a submitted job, after its last rank.

The run directory decides how the job ended; srun's exit code is only the highest of all, and 0 for a cancelled step.
Prints the report, writes status.json and exits with the job's exit code.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ppctl.errors import PpctlError, visible
from ppctl.hang.verdict import published_states
from ppctl.launch.outcome import DONE, STOPPED, JobOutcome, failures, is_echo, report, terminated
from ppctl.records.rank_records import RankState
from ppctl.runs.rundir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Print and record how the job ended; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.launch.leave")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step-code", type=int, required=True)
    parser.add_argument("--ended", action="store_true", help="the job was ended from outside")
    args = parser.parse_args(argv)
    run = RunDir(args.run)
    outcome = job_outcome(run, args.step_code, ended=args.ended)
    if outcome.report:
        print(visible(outcome.report), file=sys.stderr)
    outcome.write(run, _states(run))
    return outcome.exit_code


def job_outcome(run: RunDir, step_code: int, *, ended: bool) -> JobOutcome:
    """The outcome of the job, from the files of its ranks; `ended`: it was ended from outside."""
    found, result = failures([], run.errors()), run.result().get("state")
    if found and not (ended and is_echo(found[0])):  # connections break when a job is ended from outside
        world = 0
        with suppress(PpctlError):  # a damaged plan
            world = run.read_plan().sizes.world
        # Published heartbeats are up to ten seconds old, too old for the place of the failure.
        return JobOutcome(found[0].exit_code, "failed", report(run, found, {}, world))
    if result == "finished":
        return JobOutcome(DONE, "finished")
    if result == "stopped":
        return JobOutcome(STOPPED, "stopped")
    if ended:
        return terminated(run, "the job was ended")
    status = run.status()
    if status["state"] == "failed" and str(status.get("message")).startswith("PP-E"):
        return JobOutcome(status.get("exit_code", 1), "failed")  # an agent's own problem, which it has printed
    lines = [
        f"error PP-E703: the ranks ended (exit code {step_code}) and none of them gave a reason",
        *(f"  rank {state.rank} was {state.state} at step {state.step + 1}" for state in _states(run)[:8]),
        "  SIGKILL from the kernel (out of memory), a node that went away, or their starter, whose lines are in "
        f"{run.job_log if run.job_log.exists() else 'the log of the pod'}",
        "  more: ppctl explain PP-E703",
    ]
    return JobOutcome(1, "failed", "\n".join(lines))


def _states(run: RunDir) -> list[RankState]:
    return published_states(run.heartbeats(), now=0.0, silence=math.inf)


if __name__ == "__main__":
    sys.exit(main())
