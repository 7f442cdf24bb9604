"""`ppctl submit`: plan, make the run directory, write the batch script, hand it to SLURM.

Knows the order and what a person is told. Must not know torch, nor how a script is written (`launch/script.py`) or
SLURM is asked (`launch/slurm.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ppctl.cli.console import note
from ppctl.cli.jobs import hand_over
from ppctl.cli.plan import planned
from ppctl.cli.train import typed, with_beginning
from ppctl.cli.training import program, refuse, shown
from ppctl.config.gpu_environment import gpu_environment
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem
from ppctl.launch import slurm
from ppctl.launch.enter import LIVE, package_digest
from ppctl.launch.environment import Started
from ppctl.launch.prepare import Launch, new_run, with_value
from ppctl.launch.script import Batch, render
from ppctl.plan import Plan
from ppctl.rundir import RunDir
from ppctl.runs import find_run

TELLS_PROBLEMS = True
"""Asks the front for its own problems: they are told with those of the plan."""

_WATCHED = 3.0
"""Seconds after submission in which a reason to wait for ever shows itself."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How the ranks lie on nodes."""

    nodes: int
    ranks_per_node: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--dry-run", action="store_true", help="print the batch script; write and submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object: run, job")


def run(args: argparse.Namespace) -> int:
    """Submit. Exit codes: 0 submitted, 2 config or SLURM refuses, 3 checkpoint, 4 memory."""
    launch, shape, untrained = prepare(args)
    after = job_to_wait_for(launch.config)
    if args.dry_run:
        home = Path(launch.config.log.dir).absolute() / launch.config.log.name / "ID"
        sys.stdout.write(script(launch, shape, home, after))
        for problem in untrained:
            note(f"note: it would not be submitted: {problem.message}")
        return 0
    if not slurm.is_here():
        message = "there is no sbatch here: jobs are submitted from a machine that has SLURM's commands"
        raise ConfigError(Problem("PP-E620", message, f"{launch.command} --dry-run", "PATH"))
    opened = submit(launch, shape, after)
    number = str(opened.job()["job"])
    if args.json:
        print(json.dumps({"run": str(opened.path), "id": opened.id, "job": number}))
    else:
        print(_submitted(opened, number))
    return _watch(opened)


def prepare(args: argparse.Namespace) -> tuple[Launch, Shape, list[Problem]]:
    """(the run, its shape, what this release cannot train of it). Raises PpctlError with all problems.

    Only a dry run goes on with what cannot be trained.
    """
    from ppctl.data.examine import examine  # numpy

    began = time.perf_counter()
    composed, plan, problems = planned(args.overrides, args.problems, for_training=True)
    untrained = [problem for problem in problems if problem.code == "PP-E118"]
    if args.dry_run:
        problems = [problem for problem in problems if problem not in untrained]
    shape = None
    if composed is not None and plan is not None:
        shape, more = lie(composed.config, plan)
        problems += more
    refuse(problems)
    assert composed is not None and plan is not None and shape is not None  # without problems there are all
    for line in composed.notes:
        note(f"note: {line}")
    config = with_value(composed.config, "launch", target="slurm")
    if config.launch.device == "cuda":
        variables, problems = gpu_environment(config, plan.sizes.pp, os.environ, config.launch.env)
        refuse(problems)
        config = with_value(config, "launch", env=variables)
    data: Mapping[str, Any] = {}
    if not args.dry_run:  # which looks at no files
        config = with_beginning(config)
        data, problems = examine(config)
        refuse(problems)
    return Launch(config, plan, typed("submit", args), data, time.perf_counter() - began), shape, untrained


def lie(config: RunConfig, plan: Plan) -> tuple[Shape | None, list[Problem]]:
    """How the plan's ranks lie on nodes, and what keeps them from doing so."""
    world, launch = plan.sizes.world, config.launch
    problems = []
    if launch.device == "any":
        message = "a job asks for GPUs or does not: launch.device=any cannot be settled on the machine that submits"
        remedy = "launch.device=cuda\nlaunch.device=cpu"
        problems.append(Problem("PP-E629", message, remedy, "launch.device = any"))
    nodes, per_node = launch.nodes, launch.gpus_per_node
    if nodes is None:
        nodes = 1 if per_node is None else -(-world // per_node)
    per_node = -(-world // nodes) if per_node is None else per_node
    if nodes * per_node != world:
        message = f"the plan has {world} ranks, and nodes {nodes} x {per_node} ranks = {nodes * per_node}"
        fitting = next(size for size in range(min(per_node, world), 0, -1) if world % size == 0)
        remedy = f"nodes={world // fitting} gpus_per_node={fitting}"
        return None, [*problems, Problem("PP-E603", message, remedy, "launch.nodes, launch.gpus_per_node")]
    return Shape(nodes, per_node), problems


def job_to_wait_for(config: RunConfig) -> str | None:
    """The job of the run that `launch.after` names; None without one, and where that run has finished.

    Raises ConfigError where it was not submitted, or has ended otherwise.
    """
    if config.launch.after is None:
        return None
    before = find_run(config.launch.after, Path(config.log.dir))
    said, job = before.status()["state"], before.job().get("job")
    if said == "finished":
        return None
    job_state = None if job is None else slurm.state(str(job), str(before.job().get("cluster") or ""))
    if job_state is None or job_state.ended:
        message = f"launch.after: run {before.id} is {said}, and no job of SLURM's will finish it"
        remedy = f"ppctl requeue {before.path}" if job else "launch.after=null"
        raise ConfigError(Problem("PP-E628", message, remedy, "launch.after"))
    return str(job)


def script(launch: Launch, shape: Shape, run: Path, after: str | None) -> str:
    """The batch script of a run in the directory `run`."""
    return render(batch(launch, shape, run, after))


def batch(launch: Launch, shape: Shape, run: Path, after: str | None) -> Batch:
    """What the script is made for."""
    said = launch.config.launch
    return Batch(
        config=launch.config,
        run=str(run),
        nodes=shape.nodes,
        ranks_per_node=shape.ranks_per_node,
        command=launch.command,
        python=said.python or sys.executable,
        code=LIVE if said.code == LIVE else package_digest(),
        after=after,
    )


def submit(launch: Launch, shape: Shape, after: str | None) -> RunDir:
    """Make the run directory and submit its script. Where SLURM refuses, nothing is left."""
    run = new_run(replace(launch), Started("person"))
    try:
        run.write_script(script(launch, shape, run.path, after))
        hand_over(run)
    except BaseException:
        shutil.rmtree(run.path, ignore_errors=True)
        raise
    return run


def _submitted(run: RunDir, number: str) -> str:
    name, where = program(), shown(run.path)
    lines = [f"job {number}", f"run {run.path}", "", "next:"]
    return "\n".join([*lines, *(f"  {name} {command} {where}" for command in ("status", "logs", "cancel"))])


def _watch(run: RunDir) -> int:
    """Look for a reason that keeps the job pending for ever; such a job is cancelled."""
    number, cluster = str(run.job()["job"]), str(run.job().get("cluster") or "")
    deadline = time.monotonic() + _WATCHED
    while time.monotonic() < deadline:
        state = slurm.state(number, cluster)
        if state is None or state.state != "PENDING":
            return 0
        if state.never is not None:
            slurm.cancel(number, cluster)
            message = f"job {number} would never start: {state.never} ({state.reason}); it was cancelled"
            run.write_status("failed", message=message, exit_code=ConfigError.exit_code)
            raise ConfigError(Problem("PP-E627", message, "sinfo -o '%P %D %l %f %G'", str(run.submit_script)))
        if state.reason in ("Priority", "Resources", "Dependency", "BeginTime"):
            return 0
        time.sleep(0.3)
    return 0
