"""Runs an accepted plan on this machine: the steps that `train`, `resume`, `submit` and `parity` have in common.

A process that torchrun, SLURM or another scheduler started becomes a rank: `python -m ppctl.rank.worker`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from ppctl.checkpoint.local_copy import refused_on_one_host
from ppctl.cli import plan_text
from ppctl.cli.console import is_live, note, print_problems, prose, width
from ppctl.cli.longer import longer, rates_text, same_rates
from ppctl.cli.runs import checkpoint_of, program, short_path
from ppctl.config.argv import typed_again
from ppctl.config.checks import check
from ppctl.config.compose import Composed
from ppctl.config.gpu_environment import gpu_environment, kept_allocator, kept_queue
from ppctl.config.launch_config import LaunchConfig
from ppctl.config.schema import RunConfig
from ppctl.errors import PpctlError, Problem, pasted, pip_install
from ppctl.hang.progress import Limits
from ppctl.host.devices import machines
from ppctl.host.private_files import own_directory, shared_memory
from ppctl.host.processes import python
from ppctl.launch.described import absent_for, other_version
from ppctl.launch.environment import Started, detect
from ppctl.launch.machine import choose_device, count_gpus, shortage, with_overrides
from ppctl.launch.outcome import DONE, INTERRUPTED, STOPPED, JobOutcome
from ppctl.launch.planning import planned, refuse
from ppctl.launch.process import become_worker, writer_to
from ppctl.launch.run_directory import Launch, with_value
from ppctl.launch.trackers import unusable
from ppctl.launch.watch import LocalJob, supervise
from ppctl.launch.weights import check_weights, find_weights
from ppctl.plan import Plan, plan_checked
from ppctl.runs.checkpoint_folder import AUTO, candidates, step_of
from ppctl.runs.finding import checkpoint_if_any, find_checkpoint
from ppctl.runs.heartbeat import host_name
from ppctl.runs.rundir import RunDir


@contextmanager
def start_of(args: argparse.Namespace) -> Iterator[Started]:
    """The launcher that started this process. Ranks other than 0 become workers here, and do not return.

    Problems raised inside are printed once, by rank 0 (with --json as one object, too); all ranks exit with their code.
    """
    started = detect(os.environ)
    if not started.is_rank and os.environ.get("PET_NNODES"):  # a pod of Kubeflow's TrainJob, with torchrun's options
        os.execv(sys.executable, [*python("torch.distributed.run"), "-m", "ppctl", *args.typed])
    if started.rank > 0:
        if started.by != "slurm" and started.variables["LOCAL_RANK"] == "0":
            note(_of_a_node(started.variables))
        become_worker(started, "--join")
    try:
        yield started
    except KeyboardInterrupt:
        note("interrupted before the run began: nothing was written")
        raise
    except PpctlError as error:
        if args.json:
            problems = [problem.to_json() for problem in error.problems]
            print(json.dumps({"state": "refused", "exit_code": error.exit_code, "problems": problems}), flush=True)
        if not started.is_rank:
            raise
        print_problems(error.problems)
        become_worker(started, "--refuse", str(error.exit_code))


def _of_a_node(variables: Mapping[str, str]) -> str:
    """A line for the terminal of any node but the first. The terminal shows nothing else of a run that goes well."""
    first, last = int(variables["RANK"]), int(variables["RANK"]) + int(variables["LOCAL_WORLD_SIZE"]) - 1
    ranks = f"rank {first}" if first == last else f"ranks {first} to {last}"
    server = f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}"
    who = f"{host_name()}: {ranks} of {variables['WORLD_SIZE']}, waiting for rank 0 at {server}"
    return f"note: {who}; rank 0's terminal shows the steps, and this one only what goes wrong"


def accepted(composed: Composed, plan: Plan | None, problems: Sequence[Problem]) -> Plan:
    """Print the notes on a config, and return its plan. If there are problems, raises as `refuse` does."""
    refuse(problems)
    assert plan is not None  # there were no problems
    for line in composed.notes:
        note(f"note: {line}")
    return plan


def adapt_to_machine(
    config: RunConfig, plan: Plan, arguments: Sequence[str], started: Started, command: str = "train"
) -> tuple[RunConfig, Plan, Mapping[str, Any]]:
    """(`config` with its device and its GPU environment, its plan on that device, facts about its data).

    `command` and `arguments` are what was typed, for remedies (`resume RUN` with the run's name). Raises ConfigError
    with all problems if the run is not possible on this machine.
    """
    from ppctl.data.load import examine  # numpy

    world = plan.sizes.world
    per_node = machines(config.launch.nodes, config.launch.gpus_per_node, world)[1] if started.by == "node" else world
    ranks_here = int(started.variables.get("LOCAL_WORLD_SIZE", per_node))
    share = config.launch.share_gpu
    device = choose_device(_asked_device(config, plan), ranks_here, os.environ, share=share)
    problems = list(other_size_of_nodes(config.launch, world)) if started.by == "node" else []
    if find_spec("torch") is None:
        message = "torch is not installed here, but training needs it"
        problems.append(Problem("PP-E604", message, pip_install("torch")))
    else:
        problems += absent_for(config.model)
        if other := other_version(config.model):
            note(f"note: {other}")
    if started.is_rank and started.world_size != world:
        problems.append(_other_world(started, world, arguments))
    elif not started.is_rank and config.launch.target == "env":
        message = "launch.target=env: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set"
        remedy = f"{typed_again(command, arguments)} launch.target=local"
        problems.append(Problem("PP-E607", message, remedy, "launch.target = env"))
    else:
        problems += shortage(device, ranks_here, arguments, os.environ, share=share, command=command)
    one_host = ranks_here == world and started.by in ("person", "torchrun", "node")
    problems += refused_on_one_host(world) if one_host and config.checkpoint.local_replicas else []
    adapted = with_value(config, "launch", device=device, share_gpu=share and device == "cuda")
    if device != config.launch.device:  # times, limits and messages depend on the device
        refuse(problems)
        sources = plan.provenance
        plan = plan_checked(adapted, sources, check(adapted, sources), title=plan.name, before=plan)
        problems += plan.problems
    config, conflicts = with_gpu_environment(adapted, plan)
    data, wrong = examine(config)
    refuse([*problems, *conflicts, *wrong, *unusable(config)])
    return config, plan, data


def other_size_of_nodes(launch: LaunchConfig, world: int) -> Iterator[Problem]:
    """Yield a problem if the nodes do not hold exactly the plan's ranks."""
    nodes, per_node = machines(launch.nodes, launch.gpus_per_node, world)
    if nodes * per_node != world:
        message = f"the plan has {world} ranks, but {nodes} nodes x {per_node} ranks = {nodes * per_node}"
        fitting = next(size for size in range(min(per_node, world), 0, -1) if world % size == 0)
        remedy = f"nodes={world // fitting} gpus_per_node={fitting}"
        yield Problem("PP-E603", message, remedy, "launch.nodes, launch.gpus_per_node")


def _asked_device(config: RunConfig, plan: Plan) -> str:
    """`launch.device`; `cpu` for a `model.from` on a machine without GPU, unless the device is set."""
    left_open = plan.provenance.get("launch.device", "default") == "default" and config.model.from_ is not None
    if not left_open or config.launch.device != "cuda" or count_gpus(os.environ):
        return config.launch.device
    note("note: this machine has no GPU: ranks run on the CPU, over gloo; launch.device=cuda refuses that")
    return "cpu"


def _other_world(started: Started, world: int, arguments: Sequence[str]) -> Problem:
    typed = typed_again("train", arguments)
    remedies = {"slurm": f"srun -n {world} {typed}", "torchrun": f"torchrun --nproc-per-node {world} -m {typed}"}
    remedy = remedies.get(started.by, f"WORLD_SIZE={world}")
    larger = with_overrides(arguments, "launch.nodes=1", f"launch.gpus_per_node={started.world_size}")
    plan, problems = planned(larger, for_training=True)[1:]
    if plan is not None and plan.sizes.world == started.world_size and not problems:
        remedy += "\n" + typed_again("plan", larger)
    starter = {"slurm": "srun", "env": "the environment"}.get(started.by, started.by)
    message = f"the plan is for {world} ranks, but {starter} has started {started.world_size}"
    return Problem("PP-E603", message, remedy, f"WORLD_SIZE = {started.world_size} ({starter})")


def with_gpu_environment(config: RunConfig, plan: Plan) -> tuple[RunConfig, list[Problem]]:
    """(`config` whose `launch.env` has the variables that ranks on GPUs need, problems of variables that contradict
    these). Prints a note on each of the user's own variables that is kept."""
    if config.launch.device != "cuda":
        return config, []
    environ, pp = os.environ, plan.sizes.pp
    variables, conflicts = gpu_environment(config, pp, environ, config.launch.env, routed=plan.routed)
    for kept in (kept_allocator(environ, config.launch.env), kept_queue(config, pp, environ, config.launch.env)):
        if kept is not None:
            note(kept)
    return with_value(config, "launch", env=variables), conflicts


def with_paths(config: RunConfig) -> RunConfig:
    """`config` with the paths of the checkpoint or weights to begin from. Raises PpctlError if they are missing."""
    if config.checkpoint.load is not None and config.checkpoint.resume is None:
        checkpoint = checkpoint_if_any(config.checkpoint.load, Path(config.log.dir))
        outcome = f"going on from {checkpoint}" if checkpoint else "nothing is there yet, so the run begins"
        note(f"note: checkpoint.load={config.checkpoint.load}: {outcome}")
        if checkpoint is not None:
            _note_rates(config, checkpoint)
            config = with_value(config, "checkpoint", resume=str(checkpoint), load=None)
    elif config.checkpoint.resume not in (None, AUTO):
        checkpoint = find_checkpoint(config.checkpoint.resume, Path(config.log.dir))
        _note_rates(config, checkpoint)
        config = with_value(config, "checkpoint", resume=str(checkpoint))
    if config.model.from_ is not None:
        weights = find_weights(config.model.from_, Path(config.log.dir))
        for line in check_weights(weights, config.model):
            note(f"note: {line}")
        config = with_value(config, "model", from_=str(weights))
    return config


def _note_rates(config: RunConfig, checkpoint: Path) -> None:
    """Print a note on the learning rate if the checkpoint's run had another one."""
    with suppress(PpctlError, OSError, ValueError, ArithmeticError):
        before, done = RunDir(checkpoint.parent.parent).read_config(), step_of(checkpoint)
        if not same_rates(before, config):
            note(f"note: learning rate: {rates_text(before, config, done)}")


def command_line(command: str, args: argparse.Namespace) -> str:
    """The command line with full names, ready to paste."""
    return f"{program()} {typed_again(command, args.line).removeprefix('ppctl ')}"


def run_to_end(run: RunDir, launch: Launch, started: Started, as_json: bool) -> int:
    """Print the first screen, run the job to its end and print how it ended. Returns the exit code. A process that a
    launcher started becomes a worker, and does not return."""
    out = sys.stderr if as_json else sys.stdout
    device, environment = launch.config.launch.device, launch.config.launch.env
    try:
        print(f"{first_screen(launch.plan)}\n\nrun {short_path(run.path)} on {device}\n", file=out, flush=True)
        if started.is_rank:
            become_worker(started, "--publish", str(run.path), *["--json"] * as_json, environment=environment)
        outcome = run_job(run, launch, out)
        if outcome.exit_code in (DONE, STOPPED) and not as_json:
            print("\n".join(ending(run, launch, outcome)))
    except KeyboardInterrupt:  # before the ranks are watched, or after they have ended
        outcome = JobOutcome(INTERRUPTED, "interrupted", "interrupted")
        note(outcome.report + saved_before(run, outcome))
    if as_json:
        print(json.dumps(run.answer(outcome.state, outcome.exit_code, outcome.report)))
    return outcome.exit_code


def run_job(run: RunDir, launch: Launch, out: TextIO) -> JobOutcome:
    """Run the job, and print its steps on `out`; stderr shows failures, and how to go on. Returns the outcome."""
    config = launch.config
    if sys.stdout.isatty():  # rank 0 prints into a pipe and cannot see the terminal's width
        os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
    tried = candidates(config.checkpoint.resume, run.checkpoints)
    limits, first_step = Limits.of(config.launch), step_of(tried[0].path if tried else None)
    with own_directory(shared_memory()) as directory:
        job = LocalJob(run, launch.plan.sizes.world, directory, config.launch.env, limits=limits, first_step=first_step)
        lines: AbstractContextManager[Callable[[str], None]] = nullcontext(writer_to(out))
        if out is sys.stdout and is_live():  # steps are printed above a block that shows the run's progress
            from ppctl.cli.live import live_block  # rich

            lines = live_block(run, directory, job.world_size, config.train.steps)
        with lines as write:
            outcome = supervise(job, write)
    if outcome.exit_code == INTERRUPTED and sys.stderr.isatty():
        note("")  # the terminal has shown ^C
    if outcome.report:
        note(outcome.report + saved_before(run, outcome))
    return outcome


def first_screen(plan: Plan) -> str:
    """The first screen of a training run: the letters, the layers of each pp_rank, and the equations."""
    columns = width()
    facts = prose([*plan_text.equations(plan), plan_text.schedule_line(plan)], columns)
    return "\n".join([prose([plan_text.legend(plan)], columns), "", plan_text.drawing(plan), "", facts])


def saved_before(run: RunDir, outcome: JobOutcome) -> str:
    """A line on the checkpoint to go on from; after an interruption without a checkpoint, how to get one next time."""
    checkpoint = checkpoint_of(run)
    if outcome.exit_code == STOPPED or (checkpoint is None and outcome.exit_code != INTERRUPTED):
        return ""  # `ending` prints the commands of a run that saved
    if checkpoint is None:
        again = "checkpoint.interval=100 saves every 100 steps; Ctrl-C saves too, once, after the first step"
        return f"\n  no checkpoint yet: {again}"
    return f"\n  go on from {checkpoint.name} with: {program()} resume {pasted(short_path(run.path))}"


def ending(run: RunDir, launch: Launch, outcome: JobOutcome) -> list[str]:
    """The last lines on the screen: the model's sample, the paths, and commands to go on with."""
    name, lines = program(), [""]
    result = run.result()
    where = ", from the middle of its data" if launch.config.log.prompts is None else ""
    for sample in result.get("samples") or filter(None, [result.get("sample")]):
        lines += [f"the model reads{where}:", _indented(str(sample.get("prompt", ""))), ""]
        lines += ["the model writes, choosing from the likeliest tokens:", _indented(str(sample.get("text", ""))), ""]
    checkpoint = checkpoint_of(run)
    lines.append(f"run         {run.path}")
    lines += [f"checkpoint  {checkpoint}"] if checkpoint else []
    where = pasted(short_path(run.path))
    if outcome.exit_code == STOPPED:
        return [*lines, "", "stopped after saving; go on with:", f"  {name} resume {where}"]
    recipe = "deepseek_v3" if launch.config.recipe == "quickstart" else launch.config.recipe
    lines += ["", "next:"]
    lines += [f"  {name} plan {pasted(f'+recipe={recipe}')}"] if recipe else []
    return [*lines, f"  {longer(short_path(run.path), launch.config)}"]


def _indented(text: str) -> str:
    """`text` indented and wrapped at the terminal's width, with control characters as dots."""
    if not text.strip():
        return "  (blanks only)"
    visible = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
    room = max(shutil.get_terminal_size().columns - 4, 20)
    lines = [line[at : at + room] for line in visible.split("\n") for at in range(0, max(len(line), 1), room)]
    return "\n".join(f"  {line}" for line in lines)
