"""`ppctl submit`: plan, make the run directory, write the batch script, submit it to SLURM."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppctl.cli.console import note
from ppctl.cli.jobs import hand_over, job_of
from ppctl.cli.local_run import accepted, command_line, with_gpu_environment, with_paths
from ppctl.cli.runs import program, short_path
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.devices import machines
from ppctl.launch import slurm
from ppctl.launch.enter import LIVE, package_digest
from ppctl.launch.environment import Started
from ppctl.launch.planning import planned, refuse
from ppctl.launch.run_directory import Launch, new_run, with_value
from ppctl.launch.script import SlurmJob, render
from ppctl.runs.finding import find_run
from ppctl.runs.rundir import RunDir, printable

_WATCHED = 3.0
"""Seconds after the submission within which SLURM shows a reason why a job can never start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--dry-run", action="store_true", help="print the batch script; write and submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object: run, id, job")


def run(args: argparse.Namespace) -> int:
    """Submit. Exit codes: 0 submitted, 2 config or SLURM refuses, 3 checkpoint, 4 memory."""
    launch, job, untrained = prepare(args)
    if args.dry_run:
        sys.stdout.write(render(job))
        for problem in untrained:
            note(f"note: it would not be submitted: {problem.message}")
        return 0
    if shutil.which("sbatch") is None:
        message = "there is no sbatch here: jobs are submitted from a machine that has SLURM's commands"
        raise ConfigError(Problem("PP-E620", message, f"{launch.command} --dry-run", "PATH"))
    run_dir = submit(launch, job)
    number = str(run_dir.job()["job"])
    if args.json:
        print(json.dumps({"run": str(run_dir.path), "id": run_dir.id, "job": number}))
    else:
        print(f"job {number}\nrun {run_dir.path}\n\nnext:")
        for command in ("status", "logs", "cancel"):
            print(f"  {program()} {command} {pasted(short_path(run_dir.path))}")
    return _check_start(run_dir)


def prepare(args: argparse.Namespace) -> tuple[Launch, SlurmJob, list[Problem]]:
    """(the launch, its SLURM job, problems with what this release cannot train). Raises PpctlError with all others.

    Only a dry run goes on with what cannot be trained; it looks at no files, and its run directory is called ID.
    """
    from ppctl.data.load import examine

    began = time.perf_counter()
    composed, plan, problems = planned(args.line, for_training=True)
    untrained = [problem for problem in problems if problem.code == "PP-E118"]
    if args.dry_run:
        problems = [problem for problem in problems if problem not in untrained]
    nodes, ranks_per_node = 0, 0
    if plan is not None:
        nodes, ranks_per_node, more = nodes_of(composed.config, plan.sizes.world)
        problems += more
    plan = accepted(composed, plan, problems)
    config, problems = with_gpu_environment(with_value(composed.config, "launch", target="slurm"), plan)
    refuse(problems)
    data: Mapping[str, Any] = {}
    if not args.dry_run:
        config = with_paths(config)
        data, problems = examine(config)
        refuse(problems)
    launch = Launch(config, plan, command_line("submit", args), data, time.perf_counter() - began)
    job = SlurmJob(
        config=config,
        run=str(printable(Path(config.log.dir).absolute() / config.log.name / "ID")),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        command=launch.command,
        python=config.launch.python or sys.executable,
        code=LIVE if config.launch.code == LIVE else package_digest(),
        after=job_to_wait_for(config),
    )
    return launch, job, untrained


def nodes_of(config: RunConfig, world: int) -> tuple[int, int, list[Problem]]:
    """(nodes, ranks per node, problems) of a job with `world` ranks."""
    launch = config.launch
    problems = []
    if launch.device == "any":
        message = "launch.device=any depends on the machine's GPUs, and the nodes of a job may have others"
        remedy = "launch.device=cuda\nlaunch.device=cpu"
        problems.append(Problem("PP-E629", message, remedy, "launch.device = any"))
    nodes, per_node = machines(launch.nodes, launch.gpus_per_node, world)
    if nodes * per_node != world:
        message = f"the plan has {world} ranks, and nodes {nodes} x {per_node} ranks = {nodes * per_node}"
        fitting = next(size for size in range(min(per_node, world), 0, -1) if world % size == 0)
        remedy = f"nodes={world // fitting} gpus_per_node={fitting}"
        problems.append(Problem("PP-E603", message, remedy, "launch.nodes, launch.gpus_per_node"))
    return nodes, per_node, problems


def job_to_wait_for(config: RunConfig) -> str | None:
    """The job of the run `launch.after`, unless that has finished. Raises ConfigError if no job will finish it."""
    if config.launch.after is None:
        return None
    before = find_run(config.launch.after, Path(config.log.dir))
    state = before.status()["state"]
    if state == "finished":
        return None
    job = job_of(before)
    if job is None or not job.state or job.ended:
        message = f"launch.after: run {before.id} is {state}, and no SLURM job will finish it"
        remedy = f"ppctl requeue {pasted(before.path)}" if job else "launch.after=null"
        raise ConfigError(Problem("PP-E628", message, remedy, "launch.after"))
    return job.job


def submit(launch: Launch, job: SlurmJob) -> RunDir:
    """Make the run directory and submit its script. If SLURM refuses, nothing is left behind."""
    made = new_run(launch, Started("person"))
    try:
        made.write_script(render(replace(job, run=str(made.path))))
        hand_over(made)
    except BaseException:
        shutil.rmtree(made.path, ignore_errors=True)
        raise
    return made


def _check_start(run_dir: RunDir) -> int:
    """Cancel a job that can never start. Raises ConfigError (PP-E627) for it."""
    deadline = time.monotonic() + _WATCHED
    while time.monotonic() < deadline:
        job = job_of(run_dir)
        if job is None or job.state != "PENDING":
            return 0
        if job.never is not None:
            slurm.cancel(job.job, job.cluster)
            message = f"job {job.job} would never start: {job.never} ({job.reason}); it was cancelled"
            run_dir.write_status("failed", message=message, exit_code=ConfigError.exit_code)
            raise ConfigError(Problem("PP-E627", message, "sinfo -o '%P %D %l %f %G'", str(run_dir.submit_script)))
        if job.reason in ("Priority", "Resources", "Dependency", "BeginTime"):
            return 0
        time.sleep(0.3)
    return 0
