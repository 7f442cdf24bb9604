"""`ppctl cancel [RUN]` and `ppctl requeue [RUN]`: end a run's job, or let it go on.

And what `status`, `logs` and `submit` share with them: the run that is meant, the job that it is, and its script handed
over. Knows run directories and SLURM's view of a job. Must not know how a run is planned, nor how its ranks end: those
of a job that is cancelled, or that runs and is requeued, may still save.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from pathlib import Path

from ppctl.errors import ConfigError, Problem
from ppctl.launch import slurm
from ppctl.rundir import RunDir
from ppctl.runs import find_run, last_checkpoint


@dataclass(frozen=True, slots=True)
class Submitted:
    """A run that was submitted."""

    run: RunDir
    job: str
    cluster: str
    state: slurm.JobState | None
    """What SLURM says; None where it knows nothing (any more)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    return Submitted(run, job, cluster, slurm.state(job, cluster))


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


def hand_over(run: RunDir) -> None:
    """Give the run's script to sbatch, and note as which job."""
    run.write_status("queued")
    number, cluster = slurm.sbatch(run.submit_script)
    run.write_job({"job": number, "cluster": cluster, "time": time.time(), "user": os.getuid()})


def cancel(args: argparse.Namespace) -> int:
    """Cancel. A job that has ended is left as it is."""
    found = must_be_submitted(meant(args), "cancel")
    if found.state is None or found.state.ended:
        said = found.run.status()["state"]
        print(
            f"job {found.job} has ended: run {found.run.id} is {said if found.state is None else together(said, found)}"
        )
        return 0
    if found.state.ending:
        print(f"job {found.job} is ending already")
        return 0
    waiting = found.state.state == "PENDING"
    slurm.cancel(found.job, found.cluster)
    if waiting:
        found.run.write_status("interrupted", step=found.run.status().get("step"), message="cancelled before it ran")
    print(f"job {found.job} is cancelled" + ("" if waiting else "; its ranks have until SLURM's KillWait to save"))
    return 0


def requeue(args: argparse.Namespace) -> int:
    """Requeue: a job that runs saves and starts again, one that has ended is submitted again.

    Raises ConfigError where the run has done its steps.
    """
    found = must_be_submitted(meant(args), "requeue")
    going_on = found.run
    if found.state is not None and not found.state.ended:
        if found.state.state == "PENDING":
            print(f"job {found.job} is waiting already")
            return 0
        if found.state.ending:
            message = f"job {found.job} is ending, and cannot be requeued before it has ended"
            raise ConfigError(Problem("PP-E613", message, f"ppctl status {going_on.path}", str(going_on.path)))
        slurm.signal(found.job, "USR1", found.cluster)
        print(f"job {found.job} was asked to save; its script then requeues it")
        return 0
    if going_on.status()["state"] == "finished":
        steps = going_on.read_config().train.steps
        message = f"run {going_on.id} has done its {steps} steps"
        raise ConfigError(Problem("PP-E618", message, f"ppctl resume {going_on.path} steps={2 * steps}"))
    last = last_checkpoint(going_on)
    hand_over(going_on)
    print(f"job {going_on.job()['job']} goes on from {last.name if last else 'the beginning'}\nrun {going_on.path}")
    return 0
