"""`ppctl rehearse`: run the job's ranks at full size here, with meta tensors, and hold the plan against them."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from threading import Lock

from ppctl.cli.console import console, note, print_problems, width
from ppctl.cli.rehearsal_text import rehearsal_text
from ppctl.cli.timeline import add_timeline_argument, unwritable, write_timeline
from ppctl.config.argv import Arguments
from ppctl.config.compose import Composed
from ppctl.config.schema import RunConfig
from ppctl.errors import ConfigError, MemoryPlanError, PpctlError, Problem, TrainingError
from ppctl.host.private_files import own_directory
from ppctl.host.processes import python, unwinding_on_term
from ppctl.launch.described import absent_for
from ppctl.launch.machine import with_overrides
from ppctl.launch.planning import planned, without_memory
from ppctl.plan import Plan
from ppctl.plan.rehearsal import Rehearsal, kinds_of, shortened
from ppctl.records.json_reader import read
from ppctl.records.rehearsal_record import Rehearsed
from ppctl.runs.rundir import RunDir

_GPU = "launch.device=cuda"
_LAST_LINES = 12
_Shown = Callable[[int], AbstractContextManager[None]]
"""A rank's line on the terminal while it runs."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's own arguments."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rank", type=int, metavar="R", help="rehearse this global rank only")
    which.add_argument("--all-kinds", action="store_true", help="rehearse one rank of every kind (the default)")
    add_timeline_argument(parser, "--page")
    parser.add_argument("--json", action="store_true", help="print one JSON object, problems included")


def run(args: argparse.Namespace) -> int:
    """Rehearse and print. Exit code 0; 1 if a rank fails; 2 for the config; 4 if the memory does not fit."""
    composed, plan, planning = _planned_for_gpus(args.line)
    problems = without_memory(planning)
    problems += _not_rehearsed(composed.config)
    if plan is not None and args.rank is not None and not 0 <= args.rank < plan.sizes.world:
        message = f"--rank {args.rank}: the ranks are 0 to {plan.sizes.world - 1}"
        problems.append(Problem("PP-E128", message, "--rank 0", "command line"))
    if args.timeline is not None:  # a rehearsal takes a minute: what is wrong with the file is known before
        problems += unwritable(Path(args.timeline))
    if plan is None or problems:
        raise ConfigError(problems)
    for line in composed.notes:
        note(f"note: {line}")
    with unwinding_on_term():
        rehearsal = _rehearse(composed.config, plan, args.rank)
    problems = [*rehearsal.problems()]
    if args.json:
        print(json.dumps(rehearsal.report() | {"problems": [problem.to_json() for problem in problems]}, indent=2))
    else:
        print(rehearsal_text(rehearsal, width()))
    print_problems(problems)
    if args.timeline is not None:
        write_timeline(rehearsal.picture(), Path(args.timeline))
    return MemoryPlanError.exit_code if problems else 0


def _planned_for_gpus(line: Arguments) -> tuple[Composed, Plan | None, list[Problem]]:
    """The plan as it is on GPUs, whatever this machine has: ranks are rehearsed as they run there."""
    composed, plan, problems = planned(line, for_training=True)
    if composed.config.launch.device == "cuda":
        return composed, plan, problems
    note(f"note: rehearsed as on GPUs ({_GPU})")
    return planned(replace(line, overrides=with_overrides(line.overrides, _GPU)), for_training=True)


def _not_rehearsed(config: RunConfig) -> Iterator[Problem]:
    parallel = config.parallel
    if find_spec("torch") is None:
        message = "torch is not installed here, and a rehearsal runs the model's own code"
        yield Problem("PP-E604", message, "pip install torch")
    else:
        yield from absent_for(config.model)
    if parallel.enable_autocast:
        message = "autocast chooses dtypes by the kind of device, and a rehearsal runs on torch's meta device"
        yield Problem("PP-E128", message, "parallel.enable_autocast=false")
    if parallel.variable_seq_lengths:
        message = "with parallel.variable_seq_lengths other ranks send the sizes of messages, and a rehearsal has none"
        yield Problem("PP-E128", message, "parallel.variable_seq_lengths=false")
    if config.train.compile:
        note("note: layers are rehearsed uncompiled (train.compile=true): what compiled ones keep is not measured")


def _rehearse(config: RunConfig, plan: Plan, rank: int | None) -> Rehearsal:
    short_config, short = shortened(config, plan)
    kinds = kinds_of(config, plan)
    chosen = [(kind, kind.ranks[0]) for kind in kinds]
    if rank is not None:
        chosen = [(kind, rank) for kind in kinds if rank in kind.ranks]
    less = f"; {short.num_microbatches} of {plan.num_microbatches} microbatches fill a device as all do"
    note(
        f"rehearsing {len(chosen)} of {plan.sizes.world} ranks, which are of {len(kinds)} kind{'s' * (len(kinds) > 1)}"
        f"{less if short.num_microbatches < plan.num_microbatches else ''}"
    )
    with own_directory() as directory:
        files = RunDir(directory)
        files.write_config(short_config)
        files.write_plan(short)
        with _live() as shown:
            measured = _Ranks(directory, shown).measure_all([each for _, each in chosen])
    kinds_measured = tuple((kind, each) for (kind, _), each in zip(chosen, measured, strict=True))
    return Rehearsal(config, plan, short, kinds_measured)


class _Ranks:
    """Processes that rehearse a rank each, as many at a time as there are cores."""

    def __init__(self, directory: Path, shown: _Shown) -> None:
        self.directory = directory
        self.shown = shown
        self.running: set[subprocess.Popen[str]] = set()
        self.failure: PpctlError | None = None
        """The first rank that failed; its failure ends the others."""
        self.ended = False
        self._lock = Lock()
        """Held where a process starts, so that none starts after the end."""

    def measure_all(self, ranks: Sequence[int]) -> list[Rehearsed]:
        """The measurements of each rank, in order. A rank that fails, or a signal, ends all processes."""
        with ThreadPoolExecutor(max(len(os.sched_getaffinity(0)), 1)) as pool:
            try:
                return list(pool.map(self.measure, ranks))
            except BaseException:
                self.end()  # the pool waits for its threads, and they for their processes
                raise

    def measure(self, rank: int) -> Rehearsed:
        """Run one rank. Raises TrainingError (PP-E780) if it fails, CancelledError after the end."""
        started = time.monotonic()
        command = [*python("ppctl.rehearsal.rank"), str(self.directory), str(rank)]
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        with self._lock:
            if self.ended:
                raise CancelledError
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            self.running.add(process)
        with self.shown(rank):
            out, error = process.communicate()
        self.running.discard(process)
        if process.returncode:
            self.failure = self.failure or _failure(rank, out, error)
            self.end()
            raise self.failure
        note(f"  rank {rank}: {time.monotonic() - started:.0f} s")
        return read(Rehearsed, json.loads(out.splitlines()[-1]))

    def end(self) -> None:
        """End what is still running, and let nothing start any more."""
        with self._lock:
            self.ended = True
            for process in list(self.running):
                process.kill()


@contextmanager
def _live() -> Iterator[_Shown]:
    """Shows a line for each rank while it runs, with its seconds so far, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield lambda rank: nullcontext()
        return
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    columns = SpinnerColumn(), "{task.description}", TimeElapsedColumn()
    with Progress(*columns, console=console(stderr=True), transient=True) as lines:

        @contextmanager
        def shown(rank: int) -> Iterator[None]:
            line = lines.add_task(f"rank {rank}", total=None)
            try:
                yield
            finally:
                lines.remove_task(line)

        yield shown


def _failure(rank: int, out: str, error: str) -> PpctlError:
    """The problems of the config that a rank has reported; else the end of its output (PP-E780)."""
    with suppress(ValueError, KeyError, IndexError):
        return ConfigError([Problem(**problem) for problem in json.loads(out.splitlines()[-1])["problems"]])
    lines = [line.removeprefix(f"[rank{rank}]: ") for line in error.splitlines() if line.strip()]
    # The last line that is not indented: lines of a problem's place and remedies may follow.
    reason = next((line for line in reversed(lines) if line[0] != " "), "it ended without a message")
    message = f"the rehearsal of rank {rank} failed: {reason}"
    return TrainingError(Problem("PP-E780", message, "ppctl plan", "\n".join(lines[-_LAST_LINES:])))
