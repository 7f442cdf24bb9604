"""`ppctl train`: compose, check, plan, make the run directory, run the ranks, and print how it ended; -m: several."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from functools import partial

from ppctl.cli.local_run import accepted, adapt_to_machine, command_line, run_to_end, start_of, with_paths
from ppctl.cli.sweep import add_multirun, train_all
from ppctl.config.argv import retyped, typed_again
from ppctl.config.keys import keys_with
from ppctl.config.schema import RunConfig
from ppctl.errors import Problem
from ppctl.launch.environment import Started
from ppctl.launch.planning import planned
from ppctl.launch.run_directory import Launch, new_run
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
        run_dir = new_run(launch, started)
        with hold(run_dir):
            return run_to_end(run_dir, launch, started, args.json, args.line.overrides)


def prepare(args: argparse.Namespace, started: Started, command: str = "train") -> Launch:
    """The run that the command line describes. Raises PpctlError with all problems if it cannot be started."""
    began = time.perf_counter()
    composed, plan, problems = planned(args.line, for_training=True)
    facts = ["slurm", *["agents"] * (started.by != "node")]
    problems += settings_of_others(composed.config, args.line.overrides, facts)
    plan = accepted(composed, plan, problems)
    config, plan, data = adapt_to_machine(composed.config, plan, args.line.overrides, started, command)
    return Launch(with_paths(config), plan, command_line(command, args), data, time.perf_counter() - began)


def settings_of_others(config: RunConfig, arguments: Sequence[str], facts: Sequence[str]) -> Iterator[Problem]:
    """Settings that take effect in a submitted job (`slurm`) or with `ppctl node` (`agents`) only."""
    for fact in facts:
        keys = [name for name, key in keys_with(fact).items() if config[name] != key.default]
        keys = ["launch.target=slurm"] if fact == "slurm" and config.launch.target == "slurm" else keys
        where, remedy = "in a submitted job", typed_again("submit", arguments)
        if fact == "agents":
            where, remedy = "with `ppctl node`", f"ppctl node --rendezvous HOST:29500 {retyped(arguments)}"
        if keys:
            message = f"{', '.join(keys)} {'takes' if len(keys) == 1 else 'take'} effect {where} only"
            yield Problem("PP-E629", message, remedy, "launch")
