"""`ppctl resume [RUN] [KEY=VALUE ...]`: go on from a run's last checkpoint, in the same directory, in another cut too.

Knows which keys may change without changing what is computed. Must not know torch.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ppctl.checkpoint_folder import step_of
from ppctl.cli import training
from ppctl.cli.console import note
from ppctl.config.compose import Composed, RefusedError, override
from ppctl.config.keys import keys_with
from ppctl.config.mapping import to_mapping
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, Problem
from ppctl.geometry.moe_layer_freq import moe_layer_pattern
from ppctl.launch.environment import Started, detect
from ppctl.launch.others import become_worker
from ppctl.launch.prepare import Launch, go_on
from ppctl.plan import Plan, plan_checked
from ppctl.plan.schedule_file import not_trained
from ppctl.run_starts import hold
from ppctl.rundir import RunDir
from ppctl.runs import find_checkpoint, find_run

TELLS_PROBLEMS = True
"""As for train."""

_MICRO_BATCH = "train.micro_batch_size"  # pipeline.pp_microbatch_size is the same value


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help="directory, id, unique prefix or SLURM job; default: newest"
    )
    parser.add_argument("--dir", default="runs", metavar="DIR", help="where runs are looked for (default: runs)")
    parser.add_argument("--allow", action="store_true", help="let overrides change what is computed")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Go on. Exit codes as for train; 3 where there is no checkpoint."""
    started = detect(os.environ)
    if started.rank > 0:
        become_worker(started, "--join")
    with training.told_once(started, args.json):
        found = find_run(args.run, Path(args.dir))
        with hold(found):
            launch, checkpoint = prepare(args, found, started)
            return training.conduct(launch, _going_on(found, launch, checkpoint), started, args.json)


@contextmanager
def _going_on(run: RunDir, launch: Launch, checkpoint: Path) -> Iterator[RunDir]:
    yield go_on(run, launch, checkpoint)


def prepare(args: argparse.Namespace, run: RunDir, started: Started) -> tuple[Launch, Path]:
    """The run as it is to go on, and from where. Raises PpctlError where it cannot."""
    began = time.perf_counter()
    before = run.read_config()
    composed, plan, problems = _planned(run, before, args)
    changes = differences(_values(before), _values(composed.config))
    training.refuse([*problems, *displaced(changes), *([] if args.allow else forbidden(changes, before, args))])
    assert plan is not None  # without problems there is one
    given = "checkpoint.resume" in changes
    checkpoint = find_checkpoint(str(composed.config.checkpoint.resume) if given else str(run.path), Path(args.dir))
    _refuse_finished(run, composed, checkpoint, args)
    for line in (*composed.notes, f"going on with {run.path} from {checkpoint.name}"):
        note(f"note: {line}")
    for key, (old, new) in changes.items():
        note(f"  {key}: {old} -> {new}")
    config, data = training.settle(composed.config, plan, args.overrides, started)
    return Launch(
        config, plan, f"{training.program()} {_typed(args, run)}", data, time.perf_counter() - began
    ), checkpoint


def _planned(run: RunDir, before: RunConfig, args: argparse.Namespace) -> tuple[Composed, Plan | None, list[Problem]]:
    """The config with the overrides on top, its plan if it has one, and all problems of both."""
    history = {key: _earlier(run, source) for key, source in run.read_plan().provenance.items()}
    found: list[Problem] = list(args.problems)
    try:
        composed = override(before, history, args.overrides, for_training=True)
    except RefusedError as error:
        composed = error.composed
        found += error.problems
    try:
        plan = plan_checked(composed.config, composed.provenance, found)
    except ConfigError as error:
        return composed, None, list(error.problems)
    return composed, plan, list(dict.fromkeys([*plan.problems, *not_trained(composed.config, plan)]))


def _earlier(run: RunDir, source: str) -> str:
    """Where a value came from, seen from a later command line: that one is stronger than an earlier one."""
    return f"run {run.id}" if source == "command line" else source


def _values(config: Any) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for section, value in to_mapping(config).items():
        if isinstance(value, dict):
            flat |= {f"{section}.{name}": inner for name, inner in value.items()}
        else:
            flat[section] = value
    return flat


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> (old, new), of those that differ."""
    return {key: (old, after[key]) for key, old in before.items() if old != after[key]}


def displaced(changes: Mapping[str, tuple[Any, Any]]) -> list[Problem]:
    """One problem for each change that cannot take effect: a run stays in its directory."""
    return [
        Problem("PP-E617", f"{key} was {changes[key][0]}, and a run stays where it is; leave it out", place=key)
        for key in ("log.name", "log.dir")
        if key in changes
    ]


def forbidden(changes: Mapping[str, tuple[Any, Any]], before: RunConfig, args: argparse.Namespace) -> list[Problem]:
    """One problem for each change that would make the run another one: other numbers from the next step on.

    `before` is the run's config without the changes.
    """
    reasons = {key: "" for key in changes if key in keys_with("mathematics")}
    weighed = weight_of_microbatches(before)
    if _MICRO_BATCH in changes and weighed is not None:
        reasons[_MICRO_BATCH] = f"{weighed}, and "
    return [
        Problem(
            "PP-E617",
            f"{key} was {changes[key][0]} and would be {changes[key][1]}: {reason}the run would go on with other "
            "mathematics",
            f"ppctl resume {shlex.join([*([args.run] if args.run else []), *args.overrides])} --allow",
            f"{key} (command line)",
        )
        for key, reason in reasons.items()
    ]


def weight_of_microbatches(config: RunConfig) -> str | None:
    """What makes the objective depend on how the global batch is cut into microbatches; None where nothing does.

    Which ranks take the microbatches, and in how many schedule calls, matters in neither case (data_parallel_size,
    pp_batch_size): they are the same ones, cut from the global batch in its order. Losses by token and by sequence (the
    z-loss, seq_aux_loss, multi-token prediction) are means over the global batch, however it is cut.
    """
    model = config.model
    balances = model.moe_aux_loss_coeff and model.moe_router_load_balancing_type == "aux_loss"
    if balances and any(moe_layer_pattern(model)):
        return f"experts are balanced within each microbatch (model.moe_aux_loss_coeff={model.moe_aux_loss_coeff:g})"
    if config.pipeline.scale_grads_in_schedule:
        return "every microbatch weighs alike, whatever number of its tokens counts (pipeline.scale_grads_in_schedule)"
    return None


def _refuse_finished(run: RunDir, composed: Composed, checkpoint: Path, args: argparse.Namespace) -> None:
    done, steps = step_of(checkpoint), composed.config.train.steps
    finished = run.status()["state"] == "finished" and done == steps
    if finished or done > steps:
        message = f"run {run.id} has done its {done} steps"
        message += "" if finished else f", and train.steps is {steps}"
        remedy = f"ppctl resume {args.run or run.id} steps={2 * done}"
        raise ConfigError(Problem("PP-E618", message, remedy, str(run.path)))


def _typed(args: argparse.Namespace, run: RunDir) -> str:
    flags = ["--allow"] if args.allow else []
    return shlex.join(["resume", str(run.path), *args.overrides, *flags])
