"""Several runs of one command line, `-m`: checked together before the first starts, told apart by their configs.

A run of an earlier call is found by its config, which its directory has anyway: a sweep has no record that could be
half-written, and the same command again leaves out what has finished and resumes the rest.
"""

from __future__ import annotations

import argparse
import copy
import io
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

from ppctl.cli.comparison import comparison, comparison_text, labels
from ppctl.cli.console import UNFOLDED, note, overwrite, width
from ppctl.cli.jobs import state_of
from ppctl.cli.local_run import run_job
from ppctl.cli.runs import STARTED, program, short_path
from ppctl.config.argv import PLACE
from ppctl.config.hydra_source import combinations
from ppctl.config.mapping import to_values
from ppctl.errors import ConfigError, PpctlError, Problem, listed, pasted
from ppctl.launch.environment import Started
from ppctl.launch.outcome import INTERRUPTED, STOPPED, TERMINATED
from ppctl.launch.run_directory import Launch, go_on, new_run
from ppctl.runs.checkpoint_folder import step_of
from ppctl.runs.finding import last_checkpoint, list_runs
from ppctl.runs.run_starts import hold
from ppctl.runs.rundir import RunDir

_RESUME = "checkpoint.resume"
_TASK = "SLURM_ARRAY_TASK_ID"
_ORDER = ("finished", "queued", *STARTED)
"""States of runs that a sweep leaves as they are. Of several runs with one config, the first in this order counts."""


def add_multirun(parser: argparse.ArgumentParser, text: str) -> None:
    """Declare -m, which `config.argv` reads."""
    words = f"a run for each combination of listed values (lr=1e-3,3e-3 seed=1,2): {text}; again: go on with them"
    parser.add_argument("-m", "--multirun", action="store_true", help=words)


@dataclass(slots=True)
class SweptRun:
    """One run of a sweep."""

    label: str
    """The values that set the run apart: `lr=0.001 seed=2`."""
    launch: Launch
    run: RunDir | None = None
    """The run's directory, if it has begun."""
    state: str = "new"
    """`new`, or the state of `run`."""

    @property
    def is_settled(self) -> bool:
        """Whether the run has finished, or has processes or a job already."""
        return self.state in _ORDER


def prepare_all(args: argparse.Namespace, prepare: Callable[[argparse.Namespace], Launch]) -> list[SweptRun]:
    """All runs of the command line (in an array job the one of the task), each made by `prepare` from a command line
    of its own. What several note or lack is reported once. Raises one error with all problems of all runs."""
    lines = combinations(args.line)
    values = [dict(override.split("=", 1) for override in line.overrides) for line in lines]
    named = list(zip(labels(values), lines, strict=True))
    if task := os.environ.get(_TASK, ""):
        if not task.isdecimal() or int(task) >= len(named):
            message = f"{_TASK}={task}, but the sweep has {len(named)} runs, counted from 0"
            raise ConfigError(Problem("PP-E106", message, f"sbatch --array=0-{len(named) - 1}", "environment"))
        named = [named[int(task)]]
    swept, wrong, notes = [], dict[tuple[str, str, str], tuple[Problem, list[str]]](), dict[str, None]()
    kinds: set[type[PpctlError]] = set()
    for number, (label, line) in enumerate(named):
        if sys.stderr.isatty():
            overwrite(f"checking run {number + 1} of {len(named)}: {label}")
        own, words = copy.copy(args), io.StringIO()
        own.line = line
        try:
            with redirect_stderr(words):
                swept.append(SweptRun(label, prepare(own)))
        except PpctlError as error:
            kinds.add(type(error))
            for problem in error.problems:
                key = problem.code, problem.message, problem.place
                wrong.setdefault(key, (problem, []))[1].append(label)
        notes |= dict.fromkeys(words.getvalue().splitlines())
    if sys.stderr.isatty():
        overwrite("")
    for text in notes:
        note(text)
    if wrong:
        kind = kinds.pop() if len(kinds) == 1 else ConfigError
        raise kind([_of_runs(problem, labels, len(named)) for problem, labels in wrong.values()])
    return swept


def _of_runs(problem: Problem, labels: Sequence[str], count: int) -> Problem:
    if len(labels) == count:
        return problem
    where = f"in {len(labels)} of {count} runs: {listed(labels, 3)}".replace("\n", "; ")
    return replace(problem, place="\n".join(filter(None, [problem.place, where])))


def find_begun(swept: Sequence[SweptRun]) -> None:
    """Set `run` and `state` of each to this user's run of its name and config: the first by `_ORDER`, or the newest."""
    began: dict[Path, list[tuple[RunDir, dict[str, Any]]]] = {}
    for each in swept:
        config = each.launch.config
        home = Path(config.log.dir).absolute() / config.log.name
        if home not in began:
            began[home] = list(_begun(home))
        same = [(state_of(run), run) for run, values in began[home] if _is_same(values, to_values(config), run)]
        if same:
            each.state, each.run = min(same, key=lambda found: _ORDER.index(found[0]) if found[0] in _ORDER else 9)


def _begun(home: Path) -> Iterator[tuple[RunDir, dict[str, Any]]]:
    """The runs of a name, newest first, each with the config that it began with."""
    for run in list_runs(home.parent):
        with suppress(PpctlError, OSError):  # a damaged run is not of this sweep
            if run.path.parent == home and run.path.lstat().st_uid == os.geteuid():
                kept = sorted(run.path.glob("config-*.yaml"), key=lambda path: (len(path.name), path.name))
                yield run, to_values(run.read_config(kept[0].name if kept else "config.yaml"))


def _is_same(values: dict[str, Any], wanted: dict[str, Any], run: RunDir) -> bool:
    """Whether a run's first config is `wanted`; a submitted run notes there the checkpoint that it goes on from."""
    resumed = values[_RESUME]
    if wanted[_RESUME] is None and resumed is not None and Path(resumed).parent == run.checkpoints:
        values = values | {_RESUME: None}
    return values == wanted


# On this machine, one after another


def train_all(args: argparse.Namespace, started: Started, prepare: Callable[[argparse.Namespace], Launch]) -> int:
    """Train the runs of a command line, one after another. Exit codes: 0 all have finished, 1 some failed; if a run is
    stopped, its exit code, and no other run starts."""
    if started.is_rank:
        message = f"-m starts several runs, but {started.by} has started the ranks of one"
        raise ConfigError(Problem("PP-E106", message, pasted("ppctl", *args.typed), PLACE))
    swept = prepare_all(args, prepare)
    find_begun(swept)
    ended: list[tuple[RunDir, str, int]] = []
    out, code = sys.stderr if args.json else sys.stdout, 0
    try:
        for number, each in enumerate(swept, start=1):
            print(f"run {number} of {len(swept)}: {each.label}", file=out, flush=True)
            ended.append(_trained(each, started, out))
            code = max(code, ended[-1][2])
            if code in (STOPPED, INTERRUPTED, TERMINATED):
                break
    except KeyboardInterrupt:
        code = INTERRUPTED
    code = code if code in (STOPPED, INTERRUPTED, TERMINATED) else min(code, 1)
    if args.json:
        state = "finished" if not code else "failed" if code == 1 else "stopped"
        print(
            json.dumps({"state": state, "exit_code": code, "runs": [run.answer(how, left) for run, how, left in ended]})
        )
    elif len(ended) > 1:
        print(comparison_text(*comparison([run for run, *_ in ended]), width(UNFOLDED)))
    finished = sum(state == "finished" for _, state, _ in ended)
    if finished < len(swept):
        again = "finished runs are left out, others go on from their checkpoints"
        typed = f"{program()} {pasted(*args.typed)}"
        note(f"{finished} of {len(swept)} runs have finished; go on with ({again}):\n  {typed}")
    return code


def _trained(each: SweptRun, started: Started, out: TextIO) -> tuple[RunDir, str, int]:
    """Train one run, unless it has finished or runs elsewhere; returns its directory, state and exit code."""
    run, launch = each.run, each.launch
    checkpoint = last_checkpoint(run) if run is not None and not each.is_settled else None
    complete = checkpoint is not None and step_of(checkpoint) >= launch.config.train.steps
    if run is not None and (each.is_settled or complete):
        state = "finished" if complete else each.state
        print(f"{short_path(run.path)}: {state}\n", file=out, flush=True)
        return run, state, 0
    run = run if run is not None and checkpoint is not None else new_run(launch, started)
    with hold(run, strictly=checkpoint is not None):
        run = run if checkpoint is None else go_on(run, launch, checkpoint)
        where = f"{short_path(run.path)} on {launch.config.launch.device}"
        print(where + (f", from {checkpoint.name}" if checkpoint else "") + "\n", file=out, flush=True)
        outcome = run_job(run, launch, out)
    print(file=out)
    return run, outcome.state, outcome.exit_code
