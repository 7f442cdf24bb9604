"""What `status`, `logs`, `cancel` and `requeue` share: the run that is meant, and the job that it is.

Knows run directories and SLURM's view of a job. Must not know what is printed.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from ppctl.errors import ConfigError, Problem
from ppctl.launch.slurm import JobState, state
from ppctl.rundir import RunDir
from ppctl.runs import find_run


@dataclass(frozen=True, slots=True)
class Submitted:
    """A run that was submitted."""

    run: RunDir
    job: str
    cluster: str
    state: JobState | None
    """What SLURM says; None where it knows nothing (any more)."""


def add_run(parser: argparse.ArgumentParser) -> None:
    """Declare RUN and --dir."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="directory, id, unique prefix or SLURM job; default: newest"
    )
    parser.add_argument("--dir", default="runs", metavar="DIR", help="where runs are looked for (default: runs)")


def meant(args: argparse.Namespace) -> RunDir:
    """The run that the command line names."""
    return find_run(args.run, Path(args.dir))


def submitted(run: RunDir) -> Submitted | None:
    """The job of a run; None for one that was not submitted."""
    record = run.job()
    if not record.get("job"):
        return None
    job, cluster = str(record["job"]), str(record.get("cluster") or "")
    return Submitted(run, job, cluster, state(job, cluster))


def together(said: str, job: Submitted) -> str:
    """The run's state, where its job says that its directory could not be told how it ended, or that it waits again."""
    assert job.state is not None
    lives = said in ("queued", "starting", "running", "lost")
    if job.state.ended and lives:
        return "interrupted" if job.state.state == "CANCELLED" else "failed"
    if job.state.state == "PENDING" and said != "finished":
        return "queued"
    return "running" if said == "lost" and job.state.state == "RUNNING" else said


def must_be_submitted(run: RunDir, doing: str) -> Submitted:
    """The job of a run. Raises ConfigError (PP-E628) for a run that was not submitted."""
    found = submitted(run)
    if found is None:
        message = f"run {run.id} was not submitted, and there is no job to {doing}"
        raise ConfigError(Problem("PP-E628", message, f"ppctl runs show {run.path}", str(run.path)))
    return found
