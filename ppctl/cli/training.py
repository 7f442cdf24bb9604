"""What `train` and `resume` share: from a checked plan to the last line on the screen.

Knows what a person sees of a run that is started. Must not know how a config was composed, nor processes.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ppctl.checkpoint_folder import step_of
from ppctl.cli.console import note
from ppctl.cli.plan import exit_code, planned, summary
from ppctl.cli.runs import checkpoint_of
from ppctl.config.argv import retyped, typed_again
from ppctl.config.gpu_environment import gpu_environment
from ppctl.config.keys import keys_with, value_of
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, MemoryPlanError, PpctlError, Problem
from ppctl.hang.limits import Limits
from ppctl.launch.environment import Started
from ppctl.launch.machine import choose_device, shortage, with_overrides
from ppctl.launch.others import become_worker
from ppctl.launch.prepare import Launch, with_value
from ppctl.launch.supervisor import DONE, INTERRUPTED, STOPPED, Outcome, supervise
from ppctl.launch.watch import Job
from ppctl.plan import Plan
from ppctl.rundir import RunDir

_CUT = (
    "parallel.pipeline_model_parallel_size",
    "parallel.virtual_pipeline_model_parallel_size",
    "parallel.pipeline_model_parallel_layout",
    "pipeline.pp_schedule",
)
_CUTS = ((4, 1), (2, 2), (2, 1), (1, 1))


def refuse(problems: Sequence[Problem]) -> None:
    """Raise what `problems` deserve: a ConfigError (2), or a MemoryPlanError (4) where only memory is wrong."""
    if problems:
        raise (MemoryPlanError if exit_code(problems) == MemoryPlanError.exit_code else ConfigError)(problems)


@contextmanager
def told_once(started: Started, as_json: bool) -> Iterator[None]:
    """Problems inside are told once, by rank 0; ranks that others started then all leave with their exit code."""
    try:
        yield
    except PpctlError as error:
        if as_json:
            problems = [problem.to_json() for problem in error.problems]
            print(json.dumps({"state": "refused", "exit_code": error.exit_code, "problems": problems}), flush=True)
        if not started.by_others:
            raise
        for problem in dict.fromkeys(map(str, error.problems)):
            note(f"error {problem}")
        become_worker(started, "--refuse", str(error.exit_code))


def settle(
    config: RunConfig, plan: Plan, arguments: Sequence[str], started: Started
) -> tuple[RunConfig, Mapping[str, Any]]:
    """`config` with its device settled, and what its data is. Raises ConfigError where it cannot be run here."""
    from ppctl.data.examine import examine  # numpy

    world, typed = plan.sizes.world, typed_again("train", arguments)
    ranks_here = int(started.variables.get("LOCAL_WORLD_SIZE", world))
    device = choose_device(config.launch.device, ranks_here, os.environ)
    problems = []
    if find_spec("torch") is None:
        problems.append(Problem("PP-E604", "torch is not installed here, and training needs it", _install("torch")))
    if started.by_others and started.world_size != world:
        problems.append(_other_world(started, world, arguments))
    elif not started.by_others and config.launch.target == "env":
        message = "launch.target=env: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not all set"
        problems.append(Problem("PP-E607", message, f"{typed} launch.target=local", "launch.target = env"))
    else:
        problems += shortage(device, ranks_here, arguments, os.environ)
    config = with_value(config, "launch", device=device)
    if device == "cuda":
        variables, conflicts = gpu_environment(config, plan.sizes.pp, os.environ, config.launch.env)
        config = with_value(config, "launch", env=variables)
        problems += conflicts
    data, wrong = examine(config)
    refuse([*problems, *wrong])
    return config, data


def not_for_submit(config: RunConfig, arguments: Sequence[str]) -> list[Problem]:
    """What would take effect in a submitted job alone: `train` runs the ranks itself, or is one of them."""
    keys = [name for name, key in keys_with("slurm").items() if value_of(config, name) != key.default]
    keys = ["launch.target=slurm"] if config.launch.target == "slurm" else keys
    if not keys:
        return []
    message = f"{', '.join(keys)} {'takes' if len(keys) == 1 else 'take'} effect in a submitted job only"
    return [Problem("PP-E629", message, typed_again("submit", arguments), "launch")]


def _install(package: str) -> str:
    return f"{shlex.quote(sys.executable)} -m pip install {package}"


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


def program() -> str:
    """What to type to run ppctl here: its name where the PATH has it, else its path."""
    if shutil.which("ppctl"):
        return "ppctl"
    script = Path(sys.executable).with_name("ppctl")
    return shlex.quote(shown(script)) if script.exists() else f"{shlex.quote(sys.executable)} -m ppctl"


def shown(path: Path) -> str:
    """A path as short as it can be typed from here."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def conduct(
    launch: Launch,
    opened: AbstractContextManager[RunDir],
    started: Started,
    as_json: bool,
    overrides: Sequence[str] | None = None,
) -> int:
    """Open the run directory, show the first screen, run the job to its end and tell how it ended.

    `overrides` are those of a train command: commands that are proposed at the end build on them.
    """
    out = sys.stderr if as_json else sys.stdout
    with opened as run:
        device = launch.config.launch.device
        print(f"{summary(launch.plan)}\n\nrun {shown(run.path)} on {device}\n", file=out, flush=True)
        if started.by_others:
            flags = ["--json"] * as_json
            become_worker(started, "--publish", str(run.path), *flags, environment=launch.config.launch.env)
        if sys.stdout.isatty():  # rank 0 prints into a pipe, and cannot know how wide the terminal is
            os.environ["COLUMNS"] = str(shutil.get_terminal_size().columns)
        outcome = supervise(_job(run, launch.config, launch.plan.sizes.world), out)
    if outcome.exit_code == INTERRUPTED and sys.stderr.isatty():
        note("")  # the terminal has shown ^C
    if outcome.report:
        note(outcome.report + saved_before(run, outcome))
    if as_json:
        print(json.dumps(run.answer(outcome.state, outcome.exit_code, outcome.report)))
    elif outcome.exit_code in (DONE, STOPPED):
        print("\n".join(ending(run, launch, outcome, overrides)))
    return outcome.exit_code


def saved_before(run: RunDir, outcome: Outcome) -> str:
    """After an interruption: what there is to go on from, or how there would have been something."""
    if outcome.exit_code != INTERRUPTED:
        return ""
    checkpoint = checkpoint_of(run)
    if checkpoint is None:
        again = "checkpoint.interval=100 saves every 100 steps; `kill` in place of Ctrl-C saves before it ends"
        return f"\n  no checkpoint yet: {again}"
    return f"\n  go on from {checkpoint.name} with: {program()} resume {shlex.quote(shown(run.path))}"


def ending(run: RunDir, launch: Launch, outcome: Outcome, overrides: Sequence[str] | None) -> list[str]:
    """The last lines: the sample, the paths, and commands that go on from here."""
    name, lines = program(), [""]
    sample = run.result().get("sample")
    if isinstance(sample, dict):
        lines += ["the model is given, from the middle of its data:", _indented(str(sample.get("prompt", ""))), ""]
        lines += [
            "what the model writes, drawing from its likeliest tokens:",
            _indented(str(sample.get("text", ""))),
        ]
        lines.append("")
    checkpoint = checkpoint_of(run)
    lines.append(f"run         {run.path}")
    lines += [f"checkpoint  {checkpoint}"] if checkpoint else []
    where = shlex.quote(shown(run.path))
    if outcome.exit_code == STOPPED:
        return [*lines, "", f"stopped after saving; go on with: {name} resume {where}"]
    cut = None if overrides is None else _another_cut(launch.plan, overrides)
    lines += ["", "next:", f"  {name} plan {_full_size(launch.config)}"]
    lines += [f"  {name} train {cut}"] if cut else []
    return [*lines, f"  {name} resume {where} steps={2 * launch.config.train.steps}"]


def _indented(text: str) -> str:
    """`text` set in and cut at the terminal's width, with control characters as dots."""
    if not text.strip():
        return "  (blanks only)"
    visible = "".join(letter if letter.isprintable() or letter == "\n" else "·" for letter in text)
    room = max(shutil.get_terminal_size().columns - 4, 20)
    lines = [line[at : at + room] for line in visible.split("\n") for at in range(0, max(len(line), 1), room)]
    return "\n".join(f"  {line}" for line in lines)


def _job(run: RunDir, config: RunConfig, world: int) -> Job:
    first = step_of(config.checkpoint.resume)
    return Job(run, world, config.launch.env, limits=Limits.of(config.launch), first_step=first)


def _full_size(config: RunConfig) -> str:
    """The recipe at its full size where a miniature ran, else a large one."""
    return f"+recipe={config.recipe if config.recipe not in (None, 'quickstart') else 'deepseek_v3'}"


def _another_cut(plan: Plan, overrides: Sequence[str]) -> str | None:
    """The overrides of this run with other pp and vpp that plan without a problem."""
    kept = [override for override in overrides if override.partition("=")[0] not in _CUT]
    for pp, vpp in _CUTS:
        cut = [*kept, f"pp={pp}", f"vpp={vpp}"]
        if (pp, vpp) != (plan.sizes.pp, plan.sizes.vpp) and not planned(cut, for_training=True)[2]:
            return retyped(cut)
    return None
