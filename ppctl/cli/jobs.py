"""`ppctl cancel [RUN]` and `ppctl requeue [RUN]`, and the state of a run's job, for `status` and `submit` too."""

from __future__ import annotations

import argparse
from typing import Any

from ppctl.cli.longer import longer
from ppctl.cli.runs import LOST, STARTED, add_run_arguments, facts, readable
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.launch import slurm
from ppctl.launch.slurm import JobState
from ppctl.runs.finding import find_run, last_checkpoint
from ppctl.runs.rundir import RunDir

add_arguments = add_run_arguments


def job_of(run: RunDir) -> JobState | None:
    """The job of a run; None if the run was not submitted, or its job.json names no job. Raises ConfigError if the
    scheduler does not answer: a job of which nothing is known may be running."""
    record = run.job()
    if "job" not in record:
        return None
    state: JobState = _system_of(record["job"]).state(record["job"], record.get("cluster", ""))
    return state


def job_to_show(run: RunDir) -> JobState | None:
    """As `job_of`, but a scheduler that does not answer is a warning, and the job's state empty."""
    record = run.job()
    unknown = JobState(record["job"], record.get("cluster", "")) if "job" in record else None
    return readable(lambda: job_of(run)) or unknown


def _system_of(job: str) -> Any:
    if slurm.is_job(job):
        return slurm
    from ppctl.launch import kubernetes  # imports yaml and all of a plan

    return kubernetes


def combined_state(state: str, job: JobState | None) -> str:
    """The run's state in its directory, corrected by its job's: the scheduler may have ended or requeued the job, and
    this host may not see the directory that pods write."""
    if job is None or not job.state:
        return state
    if job.ended and state in ("queued", *STARTED, LOST):
        return {"CANCELLED": "interrupted", "COMPLETED": "finished"}.get(job.state, "failed")
    if job.state == "PENDING" and state != "finished":
        return "queued"
    return "running" if state in (LOST, "queued") and job.state == "RUNNING" else state


def state_of(run: RunDir) -> str:
    """The run's state, from its directory and, unless it has finished, its scheduler. Raises as `job_of`."""
    state = str(facts(run)["state"])
    return state if state == "finished" else combined_state(state, job_of(run))


def _job_to(doing: str, run: RunDir) -> JobState:
    """The job of a run. Raises as `job_of`, and ConfigError (PP-E628) if the run was not submitted."""
    job = job_of(run)
    if job is None:
        message = f"run {run.id} was not submitted, so there is no job to {doing}"
        raise ConfigError(Problem("PP-E628", message, f"ppctl runs show {pasted(run.path)}", str(run.path)))
    return job


def cancel(args: argparse.Namespace) -> int:
    """Cancel the job, unless it has ended; a run that never began is `interrupted`. Raises ConfigError without job."""
    run = find_run(args.run, args.dir)  # no remedy may offer to cancel another run
    job = _job_to("cancel", run)
    if not job.state or job.ended:
        print(f"job {job.job} has ended: run {run.id} is {combined_state(run.status()['state'], job)}")
        return 0
    if job.ending:
        print(f"job {job.job} is ending already")
        return 0
    waiting = job.state == "PENDING"
    _system_of(job.job).cancel(job.job, job.cluster)
    if waiting:
        run.write_status("interrupted", step=run.status().get("step"), message="cancelled before it ran")
    limit = "SLURM's KillWait" if slurm.is_job(job.job) else "the end of their grace"
    print(f"job {job.job} is cancelled" + ("" if waiting else f"; its ranks have until {limit} to save"))
    return 0


def requeue(args: argparse.Namespace) -> int:
    """Requeue: a running job saves and restarts, one that has ended is submitted again. Raises ConfigError for a run
    without job, or after its last step, and while the job is ending."""
    run = find_run(args.run, args.dir)  # as above
    job = _job_to("requeue", run)
    if job.state and not job.ended:
        if job.state == "PENDING":
            print(f"job {job.job} is waiting already")
            return 0
        if job.ending:
            message = f"job {job.job} is ending, so it cannot be requeued before it has ended"
            raise ConfigError(Problem("PP-E613", message, f"ppctl status {pasted(run.path)}", str(run.path)))
        _system_of(job.job).restart(job.job, job.cluster)
        starter = "script then requeues" if slurm.is_job(job.job) else "pods then start"
        print(f"job {job.job} was asked to save; its {starter} it")
        return 0
    if combined_state(run.status()["state"], job) == "finished":
        config = run.read_config()
        message = f"run {run.id} has done its {config.train.steps} steps"
        raise ConfigError(Problem("PP-E618", message, longer(str(run.path), config)))
    last, before = last_checkpoint(run), run.status()
    run.write_status("queued")
    try:
        if slurm.is_job(job.job):
            run.write_job(*slurm.sbatch(run.submit_script))
        else:
            _system_of(job.job).submit_again(run, job)
    except BaseException:
        run.write_status(**before)
        raise
    print(f"job {run.job()['job']} goes on from {last.name if last else 'the beginning'}\nrun {run.path}")
    return 0
