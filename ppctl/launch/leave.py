"""`python -m ppctl.launch.leave RUN --step-code N`: how a submitted job's ranks ended, after the last of them.

Knows that the run directory decides: result.json, errors/, status.json; srun's exit code says only that something was
wrong (it is the highest of all ranks', and 0 for a cancelled step). Must not import torch. Prints the report, writes
status.json and leaves with the job's exit code.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from ppctl.hang.waits import published_states
from ppctl.launch.report import failures, report
from ppctl.launch.supervisor import DONE, STOPPED, TERMINATED, Outcome
from ppctl.rank_records import RankState
from ppctl.rundir import RunDir


def main(argv: Sequence[str] | None = None) -> int:
    """Judge, tell, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ppctl.launch.leave")
    parser.add_argument("run", type=Path)
    parser.add_argument("--step-code", type=int, required=True)
    parser.add_argument("--ended", action="store_true", help="the job was ended from outside")
    args = parser.parse_args(argv)
    run = RunDir(args.run)
    outcome = judge(run, args.step_code, ended=args.ended)
    if outcome.report:
        print(outcome.report, file=sys.stderr)
    if run.status()["state"] != outcome.state or outcome.report:
        step = max((state.step for state in _states(run)), default=run.status().get("step"))
        line = outcome.report.partition("\n")[0]
        run.write_status(outcome.state, step=step, exit_code=outcome.exit_code, message=line)
    return outcome.exit_code


def judge(run: RunDir, step_code: int, *, ended: bool) -> Outcome:
    """How the job ended, by what its ranks have written."""
    told, result = run.errors(), run.result().get("state")
    if told:
        found = failures([], told)
        world = run.read_plan().sizes.world
        # Published heartbeats are up to ten seconds old, and would place the failure where it was not.
        return Outcome(found[0].exit_code, "failed", report(run, found, {}, world))
    if result == "finished":
        return Outcome(DONE, "finished")
    if result == "stopped":
        return Outcome(STOPPED, "stopped")
    if ended:
        return Outcome(TERMINATED, "interrupted", "terminated: the job was ended before all ranks had saved")
    text = f"error PP-E703: the ranks ended (srun: exit code {step_code}) and none of them told why"
    last = [f"  rank {each.rank} was {each.state} at step {each.step + 1}" for each in _states(run)][:8]
    said = "  SIGKILL from the kernel (out of memory), a node that went away, or srun itself: srun's lines are in"
    return Outcome(1, "failed", "\n".join([text, *last, f"{said} {run.job_log}", "  more: ppctl explain PP-E703"]))


def _states(run: RunDir) -> list[RankState]:
    """What the ranks have published last."""
    return published_states(run.heartbeats(), now=0.0, silence=math.inf)


if __name__ == "__main__":
    sys.exit(main())
