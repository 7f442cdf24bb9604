"""`python -m ppctl.launch.leave RUN --step-code N`: how a submitted job's ranks ended, after the last of them.

Knows that the run directory decides: result.json, errors/, status.json; srun's exit code says only that something was
wrong (it is the highest of all ranks', and 0 for a cancelled step). Must not import torch. Prints the report, writes
status.json and leaves with the job's exit code.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ppctl.heartbeat import Beat
from ppctl.launch.report import failures, report
from ppctl.launch.supervisor import DONE, STOPPED, TERMINATED, Outcome
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
        step = max((beat.step for beat in beats(run).values()), default=run.status().get("step"))
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
    last = [f"  rank {beat.rank} was {beat.state} at step {beat.step + 1}" for beat in beats(run).values()][:8]
    said = "  SIGKILL from the kernel (out of memory), a node that went away, or srun itself: srun's lines are in"
    return Outcome(1, "failed", "\n".join([text, *last, f"{said} {run.job_log}", "  more: ppctl explain PP-E703"]))


def beats(run: RunDir) -> dict[int, Beat]:
    """Each rank's last published heartbeat."""
    rows = [row for host in run.heartbeats().values() for row in host.get("ranks", ())]
    return {beat.rank: beat for beat in map(_beat, rows)}


def _beat(row: Mapping[str, Any]) -> Beat:
    return Beat(
        *(int(row["rank"]), int(row["pid"]), str(row["state"]), int(row["step"]), int(row["index"])),
        working=bool(row.get("working")),
        since=float(row["since"]),
    )


if __name__ == "__main__":
    sys.exit(main())
