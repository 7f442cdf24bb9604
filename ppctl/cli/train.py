"""`ppctl train`: compose, check, plan, make the run directory, run the ranks, print the ending; -m: several runs."""

from __future__ import annotations

import argparse
import time
from functools import partial

from ppctl.cli.console import note
from ppctl.cli.local_run import accepted, adapt_to_machine, command_line, run_to_end, start_of, with_paths
from ppctl.cli.sweep import add_multirun, train_all
from ppctl.launch.environment import Started
from ppctl.launch.planning import planned, settings_of_others
from ppctl.launch.run_directory import Launch, go_on, interrupted, new_run
from ppctl.runs.finding import last_checkpoint
from ppctl.runs.run_starts import hold


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    add_multirun(parser, "one after another")
    parser.add_argument("--json", action="store_true", help="print only one JSON object, at the end")


def run(args: argparse.Namespace) -> int:
    """Train. Exit codes: 0 done, 1 failed, 2 config, 3 checkpoint, 4 memory, 75 stopped after saving, 130 and 143."""
    with start_of(args) as started:
        if args.line.lists:
            return train_all(args, started, partial(prepare, started=started))
        launch = prepare(args, started)
        before = interrupted(launch, started)
        if before is None and started.by == "torchrun" and started.restarts:
            note("note: torchrun has restarted these ranks, whose run is not found: a new run begins")
        run_dir = before or new_run(launch, started)
        with hold(run_dir):
            if before is not None:
                go_on(before, launch, last_checkpoint(before))
            return run_to_end(run_dir, launch, started, args.json)


def prepare(args: argparse.Namespace, started: Started, command: str = "train") -> Launch:
    """The run that the command line describes. Raises PpctlError with all problems if it cannot be started."""
    began = time.perf_counter()
    composed, plan, problems = planned(args.line, for_training=True)
    problems += settings_of_others(composed.config, args.line.overrides, "node" if started.by == "node" else "")
    plan = accepted(composed, plan, problems)
    config, plan, data = adapt_to_machine(composed.config, plan, args.line.overrides, started, command)
    return Launch(with_paths(config), plan, command_line(command, args), data, time.perf_counter() - began)
