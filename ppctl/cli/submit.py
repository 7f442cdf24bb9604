"""`ppctl submit`: plan, make the run directory, write the batch script or the objects, submit them."""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ppctl.cli.console import aligned, note
from ppctl.cli.jobs import job_of, job_to_show
from ppctl.cli.local_run import accepted, command_line, other_size_of_nodes, with_gpu_environment, with_paths
from ppctl.cli.runs import program, short_path
from ppctl.cli.sweep import SweptRun, add_multirun, find_begun, prepare_all
from ppctl.config.argv import typed_again
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem, pasted
from ppctl.host.devices import machines
from ppctl.launch import kubernetes, slurm
from ppctl.launch.enter import code_of
from ppctl.launch.environment import Started
from ppctl.launch.kubernetes_objects import KubernetesJob, as_yaml, lacking, objects
from ppctl.launch.planning import planned, refuse, settings_of_others
from ppctl.launch.run_directory import Launch, new_run, with_value
from ppctl.launch.script import SlurmJob, directives, render, render_array
from ppctl.launch.trackers import unusable
from ppctl.plan import Plan
from ppctl.plan.memory_limit import amount
from ppctl.runs.finding import find_run
from ppctl.runs.rundir import RunDir, new_id, printable

KUBERNETES = "kubernetes"
_WATCHED = 3.0
"""Seconds after the submission within which SLURM shows a reason why a job can never start."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_multirun(parser, "one array job")
    parser.add_argument("--on", choices=("slurm", KUBERNETES), default="slurm", help="the system (default: slurm)")
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and do no more")
    parser.add_argument("--json", action="store_true", help="print one JSON object: run, id, job")


def run(args: argparse.Namespace) -> int:
    """Submit one run; with -m, as one array job, those of the command line that have no job and have not finished.
    Exit codes: 0 submitted, 2 config or the system refuses, 3 checkpoint, 4 memory."""
    several = bool(args.line.lists)
    if args.on == KUBERNETES:
        if several:
            again = f"{typed_again('submit', args.line)} --on kubernetes"
            raise ConfigError(Problem("PP-E106", "--on kubernetes submits one run; type one value of each key", again))
        return _submit_to_cluster(prepare(args), args)
    swept = prepare_all(args, prepare) if several else [SweptRun("", prepare(args))]
    jobs = [_job(each.launch) for each in swept]
    refuse(list(_of_other_size(jobs)))
    if several:
        find_begun(swept)
    left = [(each, job) for each, job in zip(swept, jobs, strict=True) if not each.is_settled]
    if args.dry_run:
        _show_script(left, several)
        return 0
    if shutil.which("sbatch") is None:
        message = "there is no sbatch here: jobs are submitted from a machine that has SLURM's commands"
        words = [word for word in args.typed[1:] if word.partition("=")[0] != "--on" and word != args.on]
        remedy = pasted("ppctl", "train", *words) if several else f"{jobs[0].command} --dry-run"
        raise ConfigError(Problem("PP-E620", message, remedy, "PATH"))
    _submit(left)
    rows = [(each, each.run, str(each.run.job().get("job"))) for each in swept if each.run]
    if args.json:
        submitted = [{"run": str(run.path), "id": run.id, "job": job} for _, run, job in rows]
        print(json.dumps({"runs": submitted} if several else submitted[0]))
    elif several:
        print(aligned([job, each.label, each.state, short_path(run.path)] for each, run, job in rows))
    else:
        _, run_dir, number = rows[0]
        _show(run_dir, number)
    return 0 if several else _check_start(rows[0][1])


def _show_script(jobs: Sequence[tuple[SweptRun, SlurmJob]], several: bool) -> None:
    if not several:
        sys.stdout.write(render(jobs[0][1]))
    elif jobs:
        sys.stdout.write(render_array(jobs[0][1], [each.run.path if each.run else Path(job.run) for each, job in jobs]))
        note(aligned(_plan_row(number, each) for number, (each, _) in enumerate(jobs)))
    else:
        note("every run of this command line has a job or has finished")


def _submit_to_cluster(launch: Launch, args: argparse.Namespace) -> int:
    """Submit one run, or print its objects. If the cluster refuses, no directory is left."""
    if args.dry_run:
        job = KubernetesJob(launch, new_id(), code_of(launch.config))
        sys.stdout.write(as_yaml(objects(job, secrets.token_hex(32))))
        return 0
    run = new_run(launch, Started("person"))
    try:
        run.write_status("queued")
        name = kubernetes.submit(run)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    submitted = {"run": str(run.path), "id": run.id, "job": name}
    print(json.dumps(submitted)) if args.json else _show(run, name)
    return 0


def _show(run: RunDir, job: str) -> None:
    print(f"job {job}\nrun {run.path}\n\nnext:")
    for command in ("status", "logs", "cancel"):
        print(f"  {program()} {command} {pasted(short_path(run.path))}")


def _plan_row(task: int, run: SweptRun) -> list[str]:
    """One line on the run of a task of the array: its values, and its plan's figures."""
    plan = run.launch.plan
    peak = amount(max(cost.peak_bytes for cost in plan.pp_ranks))
    speed = f"{plan.timing.tokens_per_s:,.0f} tokens/s"
    return [f"task {task}", run.label, f"{plan.sizes.world} ranks", f"{peak} a device", speed]


def prepare(args: argparse.Namespace) -> Launch:
    """The run that the command line describes. Raises PpctlError with all problems if it cannot be submitted.

    Only a dry run accepts settings that this release cannot train (with a note), and it reads no files."""
    from ppctl.data.load import examine

    began = time.perf_counter()
    composed, plan, problems = planned(args.line, for_training=True)
    untrained = [problem for problem in problems if args.dry_run and problem.code == "PP-E118"]
    problems = [problem for problem in problems if problem not in untrained]
    problems += settings_of_others(composed.config, args.line.overrides, args.on)
    problems += _of_nodes(composed.config, plan) if plan is not None else ()
    problems += lacking(composed.config) if args.on == KUBERNETES else ()
    plan = accepted(composed, plan, problems)
    config, problems = with_gpu_environment(with_value(composed.config, "launch", target=args.on), plan)
    refuse(problems)
    data: Mapping[str, Any] = {}
    if not args.dry_run and (args.on != KUBERNETES or Path(config.launch.kubernetes.mount).is_dir()):
        config = with_paths(config)
        data, problems = examine(config)
        same_machine = {config.launch.python, config.launch.container_image} == {None} and args.on != KUBERNETES
        refuse([*problems, *(unusable(config) if same_machine else ())])
    for problem in untrained:
        note(f"note: it would not be submitted: {problem.message}")
    command = command_line("submit", args) + " --on kubernetes" * (args.on == KUBERNETES)
    return Launch(config, plan, command, data, time.perf_counter() - began)


def _job(launch: Launch) -> SlurmJob:
    """The SLURM job of a run whose directory is not made yet (the script calls it ID). Raises as `_job_to_wait_for`."""
    config = launch.config
    nodes, ranks_per_node = machines(config.launch.nodes, config.launch.gpus_per_node, launch.plan.sizes.world)
    return SlurmJob(
        config=config,
        run=str(printable(Path(config.log.dir).absolute() / config.log.name / "ID")),
        nodes=nodes + config.launch.spares,
        ranks_per_node=ranks_per_node,
        command=launch.command,
        python=config.launch.python or sys.executable,
        code=code_of(config),
        after=_job_to_wait_for(config),
    )


def _of_nodes(config: RunConfig, plan: Plan) -> Iterator[Problem]:
    """Yield the problems of a job whose nodes do not hold exactly the plan's ranks."""
    launch = config.launch
    if launch.device == "any":
        message = "launch.device=any depends on the machine's GPUs, but the nodes of a job may have others"
        remedy = "launch.device=cuda\nlaunch.device=cpu"
        yield Problem("PP-E629", message, remedy, "launch.device = any")
    yield from other_size_of_nodes(launch, plan.sizes.world)


def _job_to_wait_for(config: RunConfig) -> str | None:
    """The job that will finish the run `launch.after`; None if there is no run to wait for. ConfigError without job."""
    if config.launch.after is None:
        return None
    before = find_run(config.launch.after, Path(config.log.dir))
    state = before.status()["state"]
    if state == "finished":
        return None
    job = job_of(before)
    if job is None or not job.state or job.ended:
        message = f"launch.after: run {before.id} is {state}, but no SLURM job will finish it"
        remedy = f"ppctl requeue {pasted(before.path)}" if job else "launch.after=null"
        raise ConfigError(Problem("PP-E628", message, remedy, "launch.after"))
    return job.job


def _submit(waiting: Sequence[tuple[SweptRun, SlurmJob]]) -> None:
    """Submit the runs' scripts, several as one array job, and make missing run directories. If SLURM refuses, no new
    directory is left behind."""
    runs: list[RunDir] = []
    if not waiting:
        return
    try:
        for each, job in waiting:
            runs.append(each.run or new_run(each.launch, Started("person")))
            runs[-1].write_script(render(replace(job, run=str(runs[-1].path))))
            runs[-1].write_status("queued")
        script = runs[0].submit_script
        if len(runs) > 1:
            script = script.with_name("array.sbatch")
            runs[0].write_script(render_array(waiting[0][1], [run.path for run in runs]), script.name)
        number, cluster = slurm.sbatch(script)
    except BaseException:
        for (each, _), run in zip(waiting, runs, strict=False):
            if each.run is None:
                shutil.rmtree(run.path, ignore_errors=True)
            else:
                run.write_status(each.state)
        raise
    for task, ((each, _), run) in enumerate(zip(waiting, runs, strict=True)):
        run.write_job(f"{number}_{task}" if len(runs) > 1 else number, cluster)
        each.run, each.state = run, "submitted"


def _of_other_size(jobs: Sequence[SlurmJob]) -> Iterator[Problem]:
    """Yield the problems of jobs that differ in size or time limit, which the tasks of an array job cannot."""
    own = ("--job-name=", "--output=")
    first, *others = [{line for line in directives(job) if not line.startswith(own)} for job in jobs]
    if odd := sorted({line for each in others for line in first ^ each}):
        message = f"the runs of an array job must have the same options of sbatch, but these differ: {', '.join(odd)}"
        yield Problem("PP-E629", message, " && ".join(job.command for job in jobs), "command line")


def _check_start(run_dir: RunDir) -> int:
    """Watch the new job for some seconds. If it can never start, cancel it and raise ConfigError (PP-E627); else 0."""
    deadline = time.monotonic() + _WATCHED
    while time.monotonic() < deadline:
        job = job_to_show(run_dir)
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
