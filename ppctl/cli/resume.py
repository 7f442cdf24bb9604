"""`ppctl resume [RUN] [KEY=VALUE ...]`: continue a run from its last checkpoint, in its directory, in any cut."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ppctl.cli import local_run
from ppctl.cli.comparison import differing
from ppctl.cli.console import note
from ppctl.cli.longer import jump_problem, jumps, longer, rates_text, same_rates, sets_rate
from ppctl.cli.runs import RUNS, add_run_arguments, named_run, program, short_path
from ppctl.config.argv import PLACE
from ppctl.config.checks import within_limits
from ppctl.config.compose import Composed, RefusedError, override
from ppctl.config.keys import keys_with, value_text
from ppctl.config.mapping import to_values
from ppctl.config.moe_layer_freq import moe_layer_pattern
from ppctl.config.quantities import steps_of
from ppctl.config.run_rules import WATCHED
from ppctl.config.schema import RunConfig
from ppctl.errors import CheckpointError, ConfigError, Problem, pasted
from ppctl.launch.environment import Started
from ppctl.launch.planning import counted_samples, plan_of, refuse
from ppctl.launch.run_directory import Launch, go_on
from ppctl.plan import Plan
from ppctl.runs.checkpoint_folder import AUTO, step_of
from ppctl.runs.finding import find_checkpoint
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir

_SEARCHED_BY = ("pipeline.pp_schedule", "pipeline.pp_schedule_csv", "pipeline.schedule_memory", "launch.device_memory")
"""While these keys stay, a searched schedule is kept, although prices may have changed since the search."""

_MICRO_BATCH = "train.micro_batch_size"  # pipeline.pp_microbatch_size always has the same value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_run_arguments(parser)
    parser.add_argument("--allow", action="store_true", help="accept overrides that change what is computed")
    parser.add_argument("--json", action="store_true", help="print only one JSON object, at the end")


def run(args: argparse.Namespace) -> int:
    """Continue the run. Exit codes as for train; 3 without a checkpoint."""
    with local_run.start_of(args) as started:
        run_dir = named_run(args)
        with hold(run_dir, strictly=not started.is_rank):
            launch, checkpoint = prepare(args, run_dir, started)
            return local_run.run_to_end(go_on(run_dir, launch, checkpoint), launch, started, args.json)


def prepare(args: argparse.Namespace, run: RunDir, started: Started) -> tuple[Launch, Path]:
    """(what to run, the checkpoint to go on from), after printing what changes. Raises PpctlError with all problems if
    the run cannot go on."""
    began = time.perf_counter()
    before = run.read_config()
    composed, plan, problems = _planned(run, before, args)
    changes = differing([to_values(before), to_values(composed.config)])
    same = not problems and same_rates(before, composed.config)
    computed = {key: change for key, change in changes.items() if not (same and sets_rate(key))}
    sound = within_limits(before)  # somebody may have altered the file
    named = composed.config.checkpoint.resume
    source = named if "checkpoint.resume" in changes and named != AUTO else run.path
    if other := [] if args.allow else _forbidden(computed, sound, args):
        # One --allow accepts both changes, because the message names both.
        with suppress(CheckpointError):
            done = step_of(find_checkpoint(str(source), args.dir))
            if not problems and jumps(before, composed.config, done):
                other.append(jump_problem(before, composed.config, done, _typed(args), "--allow"))
    refuse([*problems, *_displaced(changes), *other])
    assert plan is not None  # there were no problems
    checkpoint = find_checkpoint(str(source), args.dir)
    _refuse_finished(run, before, composed, checkpoint)
    _refuse_past(changes, composed.config, checkpoint)
    done = step_of(checkpoint)
    if not args.allow and jumps(before, composed.config, done):
        raise ConfigError(jump_problem(before, composed.config, done, _typed(args)))
    for line in (*composed.notes, f"going on with {run.path} from {checkpoint.name}"):
        note(f"note: {line}")
    for key, (old, new) in changes.items():
        note(f"  {key}: {value_text(old)} -> {value_text(new)}")
    if not same or "train.steps" in changes:
        note(f"  learning rate: {rates_text(before, composed.config, done)}")
    command = pasted("resume", str(run.path))
    config, plan, data = local_run.adapt_to_machine(composed.config, plan, args.line.overrides, started, command)
    typed = pasted("resume", str(run.path), *args.line.overrides, *["--allow"] * args.allow)
    return Launch(config, plan, f"{program()} {typed}", data, time.perf_counter() - began), checkpoint


def _planned(run: RunDir, before: RunConfig, args: argparse.Namespace) -> tuple[Composed, Plan | None, list[Problem]]:
    plan = run.read_plan()
    # Renamed, so that this command line's values replace the values of the run's command line.
    sources = {key: f"run {run.id}" if text.startswith(PLACE) else text for key, text in plan.provenance.items()}
    problems: Sequence[Problem] = ()
    try:
        composed = override(before, sources, args.line, for_training=True, count_samples=counted_samples)
    except RefusedError as error:
        composed, problems = error.composed, error.problems
    same_search = all(before[key] == composed.config[key] for key in _SEARCHED_BY)
    return composed, *plan_of(composed, problems, before=plan if same_search else None)


def _displaced(changes: Mapping[str, list[Any]]) -> list[Problem]:
    """One problem for each key that would move the run: a run stays in its directory."""
    moved = [key for key in ("log.name", "log.dir") if key in changes]
    why = "but a resumed run keeps its directory; leave this key out"
    return [Problem("PP-E617", f"{key} was {value_text(changes[key][0])}, {why}", place=key) for key in moved]


def _forbidden(changes: Mapping[str, list[Any]], before: RunConfig, args: argparse.Namespace) -> list[Problem]:
    """One problem for each changed key that would make a run of config `before` compute something else."""
    reasons = {key: "" for key in changes if key in keys_with("mathematics")}
    effect = _effect_of_microbatches(before)
    if _MICRO_BATCH in changes and effect is not None:
        reasons[_MICRO_BATCH] = f"{effect}, so "
    allowed, problems = pasted("ppctl", "resume", *_typed(args), "--allow"), []
    for key, reason in reasons.items():
        old, new = map(value_text, changes[key])
        message = f"{key} was {old} and would be {new}: {reason}the run would go on with other mathematics"
        problems.append(Problem("PP-E617", message, allowed, f"{key} (command line)"))
    return problems


def _typed(args: argparse.Namespace) -> list[str]:
    """The words that stood after `ppctl resume`, without its switches."""
    return [*filter(None, [args.run]), *(["--dir", str(args.dir)] if args.dir != RUNS else []), *args.line.overrides]


def _effect_of_microbatches(config: RunConfig) -> str | None:
    """Why the objective depends on how the global batch is divided into microbatches; None if it does not.

    Which ranks process the microbatches, and in how many schedule calls (data_parallel_size, pp_batch_size), never
    matters: the microbatches are the same, in the order of the global batch. Losses by token and by sequence (the
    z-loss, seq_aux_loss, multi-token prediction) are means over the global batch.
    """
    model = config.model
    balances = model.moe_aux_loss_coeff and model.moe_router_load_balancing_type == "aux_loss"
    if balances and any(moe_layer_pattern(model)):
        return f"experts are balanced within each microbatch (model.moe_aux_loss_coeff={model.moe_aux_loss_coeff:g})"
    if config.pipeline.scale_grads_in_schedule:
        return "every microbatch has the same weight, whatever its number of tokens (pipeline.scale_grads_in_schedule)"
    return None


def _refuse_finished(run: RunDir, before: RunConfig, composed: Composed, checkpoint: Path) -> None:
    """Raise ConfigError (PP-E618) if the checkpoint is at the last step of the run, or after it."""
    done, steps = step_of(checkpoint), composed.config.train.steps
    finished = run.status()["state"] == "finished" and done == steps
    if finished or done > steps:
        message = f"run {run.id} has done its {done} steps"
        message += "" if finished else f", but train.steps is {steps}"
        raise ConfigError(Problem("PP-E618", message, longer(short_path(run.path), before, done), str(run.path)))


def _refuse_past(changes: Mapping[str, list[Any]], config: RunConfig, checkpoint: Path) -> None:
    """Raise ConfigError (PP-E648) if this command asks to record steps that are done already."""
    done, problems = step_of(checkpoint), []
    for name in WATCHED:
        asked = changes[name][1] if name in changes else None
        if asked is not None and (steps := steps_of(asked))[0] <= done:
            message = f"{name}={asked} begins with step {steps[0]}, but the run continues after step {done}"
            last = min(done + len(steps), config.train.steps)
            problems.append(Problem("PP-E648", message, f"{name}={done + 1}:{last + 1}", f"{name} (command line)"))
    if problems:
        raise ConfigError(problems)
