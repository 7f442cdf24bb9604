"""`ppctl train`: compose, check, plan, make the run directory, run. Ranks that others started become workers.

Knows the order. Must not know torch: what trains is started as `python -m ppctl.rank.worker`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ppctl.cli import training
from ppctl.cli.console import note
from ppctl.cli.plan import planned
from ppctl.config.argv import retyped
from ppctl.config.schema import RunConfig
from ppctl.launch.environment import Started, detect
from ppctl.launch.others import become_worker
from ppctl.launch.prepare import Launch, new_run, with_value
from ppctl.launch.weights import check_weights, find_weights
from ppctl.run_starts import hold
from ppctl.rundir import RunDir
from ppctl.runs import find_checkpoint

TELLS_PROBLEMS = True
"""Asks the front for its own problems: ranks that others started must all leave with their code."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def run(args: argparse.Namespace) -> int:
    """Train. Exit codes: 0 done, 1 failed, 2 config, 3 checkpoint, 4 memory, 75 stopped after saving, 130 and 143."""
    started = detect(os.environ)
    if started.rank > 0:
        become_worker(started, "--join")
    with training.told_once(started, args.json):
        launch = prepare(args, started)
        return training.conduct(launch, _held(launch, started), started, args.json, args.overrides)


@contextmanager
def _held(launch: Launch, started: Started) -> Iterator[RunDir]:
    run = new_run(launch, started)
    with hold(run):
        yield run


def prepare(args: argparse.Namespace, started: Started) -> Launch:
    """The run that the command line describes. Raises PpctlError with all problems where it cannot be started."""
    began = time.perf_counter()
    composed, plan, problems = planned(args.overrides, args.problems, for_training=True)
    if composed is not None:
        problems += training.not_for_submit(composed.config, args.overrides)
    training.refuse(problems)
    assert composed is not None and plan is not None  # without problems there are both
    for line in composed.notes:
        note(f"note: {line}")
    config, data = training.settle(composed.config, plan, args.overrides, started)
    return Launch(with_beginning(config), plan, typed("train", args), data, time.perf_counter() - began)


def with_beginning(config: RunConfig) -> RunConfig:
    """`config` with the checkpoint or the weights that it begins from as paths. Raises PpctlError without them."""
    if config.checkpoint.resume is not None:
        found = find_checkpoint(config.checkpoint.resume, Path(config.log.dir))
        config = with_value(config, "checkpoint", resume=str(found))
    if config.model.from_ is not None:
        weights = find_weights(config.model.from_, Path(config.log.dir))
        check_weights(weights, config.model)
        config = with_value(config, "model", from_=str(weights))
    return config


def typed(command: str, args: argparse.Namespace) -> str:
    """What was typed, with full names, ready to paste."""
    recipes = [word for directory in args.recipes_dir or () for word in ("--recipes-dir", directory)]
    return " ".join(filter(None, (training.program(), command, shlex.join(recipes), retyped(args.overrides))))
