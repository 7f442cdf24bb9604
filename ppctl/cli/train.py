"""`ppctl train`: compose, check, plan, make the run directory, run the ranks, and print how it ended.

Knows this order, and what a person sees of it; `resume` and `submit` use its steps. Must not know torch: a rank is
started as `python -m ppctl.rank.worker`. A process that torchrun, SLURM or another
scheduler started becomes such a worker.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

from ppctl.checkpoint.local_copy import refused_on_one_host
from ppctl.checkpoint_folder import AUTO, candidates, step_of
from ppctl.cli.console import is_live, note, print_problems
from ppctl.cli.longer import longer, same_rates, told_rates
from ppctl.cli.plan import exit_code, planned, summary
from ppctl.cli.runs import checkpoint_of, program, short_path
from ppctl.config.argv import retyped, typed_again
from ppctl.config.compose import Composed
from ppctl.config.gpu_environment import gpu_environment, kept_allocator
from ppctl.config.keys import keys_with, value_of
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, MemoryPlanError, PpctlError, Problem, pasted
from ppctl.hang.limits import Limits
from ppctl.launch.described import absent_for, other_version
from ppctl.launch.environment import Started, detect
from ppctl.launch.machine import choose_device, count_gpus, shortage, with_overrides
from ppctl.launch.outcome import DONE, INTERRUPTED, STOPPED, JobOutcome
from ppctl.launch.process import become_worker
from ppctl.launch.run_directory import Launch, new_run, with_value
from ppctl.launch.watch import LocalJob, supervise
from ppctl.launch.weights import check_weights, find_weights
from ppctl.plan import Plan
from ppctl.private_files import own_directory, shared_memory
from ppctl.run_starts import hold
from ppctl.rundir import RunDir
from ppctl.runs import checkpoint_if_any, find_checkpoint

_CUT = (
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.pipeline_model_parallel_layout",
    "pipeline.pp_schedule",
)
_CUTS = ((4, 1), (2, 2), (2, 1), (1, 1))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--json", action="store_true", help="print only one JSON object, at the end")


def run(args: argparse.Namespace) -> int:
    """Train. Exit codes: 0 done, 1 failed, 2 config, 3 checkpoint, 4 memory, 75 stopped after saving, 130 and 143."""
    with start_of(args) as started:
        launch = prepare(args, started)
        run_dir = new_run(launch, started)
        with hold(run_dir):
            return run_to_end(run_dir, launch, started, args.json, args.overrides)


def prepare(args: argparse.Namespace, started: Started) -> Launch:
    """The run that the command line describes. Raises PpctlError with all problems if it cannot be started."""
    began = time.perf_counter()
    composed, plan, problems = planned(args.overrides, args.problems, for_training=True)
    if composed is not None:
        problems += _slurm_settings(composed.config, args.overrides)
    composed, plan = accepted(composed, plan, problems)
    config, data = adapt_to_machine(composed.config, plan, args.overrides, started)
    return Launch(with_paths(config), plan, command_line("train", args), data, time.perf_counter() - began)


# Steps that `resume` and `submit` share


@contextmanager
def start_of(args: argparse.Namespace) -> Iterator[Started]:
    """What started this process. Ranks other than 0 become workers here; they wait for what rank 0 does inside.

    Problems inside are printed once, by rank 0 (with --json as one object, too); all ranks exit with their exit code.
    """
    started = detect(os.environ)
    if started.rank > 0:
        become_worker(started, "--join")
    try:
        yield started
    except PpctlError as error:
        if args.json:
            problems = [problem.to_json() for problem in error.problems]
            print(json.dumps({"state": "refused", "exit_code": error.exit_code, "problems": problems}), flush=True)
        if not started.is_rank:
            raise
        print_problems(error.problems)
        become_worker(started, "--refuse", str(error.exit_code))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise ConfigError (exit code 2) if there are problems, or MemoryPlanError (4) if memory is the only one."""
    if problems:
        raise (MemoryPlanError if exit_code(problems) == MemoryPlanError.exit_code else ConfigError)(problems)


def accepted(composed: Composed | None, plan: Plan | None, problems: Sequence[Problem]) -> tuple[Composed, Plan]:
    """A config and its plan that have no problems, after printing the notes on them. Raises as `refuse`."""
    refuse(problems)
    assert composed is not None and plan is not None  # there were no problems
    for line in composed.notes:
        note(f"note: {line}")
    return composed, plan


def adapt_to_machine(
    config: RunConfig, plan: Plan, arguments: Sequence[str], started: Started, command: str = "train"
) -> tuple[RunConfig, Mapping[str, Any]]:
    """`config` with its device and its GPU environment, and what its data is.

    `command` and `arguments` are what was typed, for remedies (`resume RUN` with the run that it names). Raises
    ConfigError with all problems if it cannot run on this machine.
    """
    from ppctl.data.load import examine

    world = plan.sizes.world
    ranks_here = int(started.variables.get("LOCAL_WORLD_SIZE", world))
    share = config.launch.share_gpu
    device = choose_device(_asked_device(config, plan), ranks_here, os.environ, share=share)
    problems = []
    if find_spec("torch") is None:
        remedy = f"{pasted(sys.executable)} -m pip install torch"
        problems.append(Problem("PP-E604", "torch is not installed here, and training needs it", remedy))
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
    one_host = not started.is_rank or (started.by == "torchrun" and ranks_here == world)
    problems += refused_on_one_host(world) if one_host and config.checkpoint.local_replicas else []
    config, conflicts = with_gpu_environment(
        with_value(config, "launch", device=device, share_gpu=share and device == "cuda"), plan
    )
    data, wrong = examine(config)
    refuse([*problems, *conflicts, *wrong])
    return config, data


def _asked_device(config: RunConfig, plan: Plan) -> str:
    """`launch.device`; where nothing sets it and this machine has no GPU, a model that is here trains on the CPU."""
    left_open = plan.provenance.get("launch.device", "default") == "default" and config.model.from_ is not None
    if not left_open or config.launch.device != "cuda" or count_gpus(os.environ):
        return config.launch.device
    note("note: this machine has no GPU: ranks run on the CPU, over gloo; launch.device=cuda refuses that")
    return "cpu"


def with_gpu_environment(config: RunConfig, plan: Plan) -> tuple[RunConfig, list[Problem]]:
    """`config` with the variables that ranks on GPUs need in `launch.env`, and what contradicts them."""
    if config.launch.device != "cuda":
        return config, []
    environ = os.environ
    variables, conflicts = gpu_environment(config, plan.sizes.pp, environ, config.launch.env, routed=plan.routed)
    if (kept := kept_allocator(environ, config.launch.env)) is not None:
        note(kept)
    return with_value(config, "launch", env=variables), conflicts


def with_paths(config: RunConfig) -> RunConfig:
    """`config` with the paths of the checkpoint or weights that it begins from. Raises PpctlError if there are none."""
    if config.checkpoint.load is not None and config.checkpoint.resume is None:
        config = _with_loaded(config, config.checkpoint.load)
    elif config.checkpoint.resume not in (None, AUTO):
        found = find_checkpoint(config.checkpoint.resume, Path(config.log.dir))
        _tell_rates(config, found)
        config = with_value(config, "checkpoint", resume=str(found))
    if config.model.from_ is not None:
        weights = find_weights(config.model.from_, Path(config.log.dir))
        for line in check_weights(weights, config.model):
            note(f"note: {line}")
        config = with_value(config, "model", from_=str(weights))
    return config


def _tell_rates(config: RunConfig, checkpoint: Path) -> None:
    """Say what the learning rate does, where the checkpoint is of a run with other rates."""
    with suppress(PpctlError, OSError, ValueError, ArithmeticError):
        before, done = RunDir(checkpoint.parent.parent).read_config(), step_of(checkpoint)
        if not same_rates(before, config):
            note(f"note: learning rate: {told_rates(before, config, done)}")


def _with_loaded(config: RunConfig, load: str) -> RunConfig:
    """`config` with the checkpoint that `checkpoint.load` finds; as it is where the run begins."""
    found = checkpoint_if_any(load, Path(config.log.dir))
    note(f"note: checkpoint.load={load}: {f'going on from {found}' if found else 'nothing there yet, the run begins'}")
    if found is None:
        return config
    _tell_rates(config, found)
    return with_value(config, "checkpoint", resume=str(found), load=None)


def command_line(command: str, args: argparse.Namespace) -> str:
    """The command line with full names, ready to paste."""
    recipes = [word for directory in args.recipes_dir or () for word in ("--recipes-dir", directory)]
    return " ".join(filter(None, (program(), command, pasted(*recipes), retyped(args.overrides))))


def run_to_end(
    run: RunDir, launch: Launch, started: Started, as_json: bool, overrides: Sequence[str] | None = None
) -> int:
    """Print the first screen, run the job to its end and print how it ended.

    `overrides` are those of a train command, from which the last lines make commands to go on with.
    """
    out = sys.stderr if as_json else sys.stdout
    config = launch.config
    print(f"{summary(launch.plan)}\n\nrun {short_path(run.path)} on {config.launch.device}\n", file=out, flush=True)
    if started.is_rank:
        become_worker(started, "--publish", str(run.path), *["--json"] * as_json, environment=config.launch.env)
    if sys.stdout.isatty():  # rank 0 prints into a pipe and cannot see the terminal's width
        os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
    tried = candidates(config.checkpoint.resume, run.checkpoints)
    limits, first_step = Limits.of(config.launch), step_of(tried[0].path if tried else None)
    with own_directory(shared_memory()) as directory:
        job = LocalJob(run, launch.plan.sizes.world, directory, config.launch.env, limits=limits, first_step=first_step)
        with _terminal(job, config, out) as lines:
            outcome = supervise(job, lines)
    if outcome.exit_code == INTERRUPTED and sys.stderr.isatty():
        note("")  # the terminal has shown ^C
    if outcome.report:
        note(outcome.report + saved_before(run, outcome))
    if as_json:
        print(json.dumps(run.answer(outcome.state, outcome.exit_code, outcome.report)))
    elif outcome.exit_code in (DONE, STOPPED):
        print("\n".join(ending(run, launch, outcome, overrides)))
    return outcome.exit_code


@contextmanager
def _terminal(job: LocalJob, config: RunConfig, out: TextIO) -> Iterator[TextIO]:
    """Prints rank 0's lines to `out`; on a terminal above a block that shows the run's progress."""
    if out is not sys.stdout or not is_live():
        yield out
        return
    from ppctl.cli.live import live_block  # rich

    with live_block(job.run, job.directory, job.world_size, config.train.steps) as lines:
        yield lines


# Problems


def _slurm_settings(config: RunConfig, arguments: Sequence[str]) -> list[Problem]:
    """Settings that take effect in a submitted job only: `train` starts the ranks itself, or is one of them."""
    keys = [name for name, key in keys_with("slurm").items() if value_of(config, name) != key.default]
    keys = ["launch.target=slurm"] if config.launch.target == "slurm" else keys
    if not keys:
        return []
    message = f"{', '.join(keys)} {'takes' if len(keys) == 1 else 'take'} effect in a submitted job only"
    return [Problem("PP-E629", message, typed_again("submit", arguments), "launch")]


def _other_world(started: Started, world: int, arguments: Sequence[str]) -> Problem:
    typed = typed_again("train", arguments)
    how = {"slurm": f"srun -n {world} {typed}", "torchrun": f"torchrun --nproc-per-node {world} -m {typed}"}
    remedy = how.get(started.by, f"WORLD_SIZE={world}")
    larger = with_overrides(arguments, "launch.nodes=1", f"launch.gpus_per_node={started.world_size}")
    plan, problems = planned(larger, for_training=True)[1:]
    if plan is not None and plan.sizes.world == started.world_size and not problems:
        remedy += "\n" + typed_again("plan", larger)
    starter = {"slurm": "srun", "env": "the environment"}.get(started.by, started.by)
    message = f"the plan is for {world} ranks, and {starter} has started {started.world_size}"
    return Problem("PP-E603", message, remedy, f"WORLD_SIZE = {started.world_size} ({starter})")


# The last lines


def saved_before(run: RunDir, outcome: JobOutcome) -> str:
    """After an interruption: the checkpoint to go on from, or how to have one next time."""
    if outcome.exit_code != INTERRUPTED:
        return ""
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        again = "checkpoint.interval=100 saves every 100 steps; Ctrl-C saves too, once, after the first step"
        return f"\n  no checkpoint yet: {again}"
    return f"\n  go on from {checkpoint.name} with: {program()} resume {pasted(short_path(run.path))}"


def ending(run: RunDir, launch: Launch, outcome: JobOutcome, overrides: Sequence[str] | None) -> list[str]:
    """The model's sample, the paths, and commands to go on with."""
    name, lines = program(), [""]
    sample = run.result().get("sample")
    if isinstance(sample, dict):
        lines += ["the model reads, from the middle of its data:", _indented(str(sample.get("prompt", ""))), ""]
        lines += ["the model writes, choosing from the likeliest tokens:", _indented(str(sample.get("text", ""))), ""]
    checkpoint = checkpoint_of(run)
    lines.append(f"run         {run.path}")
    lines += [f"checkpoint  {checkpoint}"] if checkpoint else []
    where = pasted(short_path(run.path))
    if outcome.exit_code == STOPPED:
        return [*lines, "", "stopped after saving; go on with:", f"  {name} resume {where}"]
    recipe = "deepseek_v3" if launch.config.recipe == "quickstart" else launch.config.recipe
    cut = None if overrides is None else _another_cut(launch.plan, overrides)
    lines += ["", "next:"]
    lines += [f"  {name} plan {pasted(f'+recipe={recipe}')}"] if recipe else []
    lines += [f"  {name} train {cut}"] if cut else []
    return [*lines, f"  {longer(short_path(run.path), launch.config)}"]


def _indented(text: str) -> str:
    """`text` indented and wrapped at the terminal's width, with control characters as dots."""
    if not text.strip():
        return "  (blanks only)"
    visible = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
    room = max(shutil.get_terminal_size().columns - 4, 20)
    lines = [line[at : at + room] for line in visible.split("\n") for at in range(0, max(len(line), 1), room)]
    return "\n".join(f"  {line}" for line in lines)


def _another_cut(plan: Plan, overrides: Sequence[str]) -> str | None:
    """The overrides of this run with another pp and vpp, which plan without a problem."""
    kept = [override for override in overrides if override.partition("=")[0] not in _CUT]
    for pp, vpp in _CUTS:
        cut = [*kept, f"pp={pp}", f"vpp={vpp}"]
        if (pp, vpp) != (plan.sizes.pp, plan.sizes.vpp) and not planned(cut, for_training=True)[2]:
            return retyped(cut)
    return None
